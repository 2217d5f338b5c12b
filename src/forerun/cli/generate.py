"""`forerun generate`: stream an answer to stdout and say on stderr how it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.explanation import print_explanation
from forerun.cli.options import (
    DRAFT_PANEL,
    OUTPUT_PANEL,
    PROMPT_PANEL,
    SAMPLING_PANEL,
    Acceptance,
    AsJson,
    Device,
    DraftKind,
    DraftModel,
    Dtype,
    Head,
    MaxContext,
    ModelName,
    Precision,
    Quantization,
    Quantize,
    Quiet,
    parse_draft_tokens,
    parse_logit_bias,
    parse_suppress,
    require_positive,
)
from forerun.cli.prompt import read_prompt
from forerun.cli.statistics_line import statistics_line
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.language_model import Generation
    from forerun.response import Chunk, Response

JSON_KEYS = (
    *("text", "tokens", "finish_reason", "prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted"),
    *("seconds", "tokens_per_second", "draft", "guaranteed", "seed"),
    *("arms", "tokens_per_round", "accepted_per_position", "seconds_saved"),
)


def generate(
    model: ModelName = "smollm2",
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="What to answer; - reads stdin.", rich_help_panel=PROMPT_PANEL),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.", rich_help_panel=PROMPT_PANEL)
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message.", rich_help_panel=PROMPT_PANEL)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.", rich_help_panel=PROMPT_PANEL)
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help="Longest answer; default: until the model ends.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "--temp", help="0: the likeliest token.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Keep the likeliest tokens up to P.", rich_help_panel=SAMPLING_PANEL)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep the K likeliest tokens; 0: all.", rich_help_panel=SAMPLING_PANEL)
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Drop tokens below P × the likeliest one.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option("--repetition-penalty", help="Above 1: fewer repeats.", rich_help_panel=SAMPLING_PANEL),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option("--presence-penalty", help="Taken off tokens already said.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", help="Taken off per time already said.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS,…", help="Added to tokens.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    lang_bias: Annotated[
        str | None,
        typer.Option(
            "--lang-bias",
            metavar="ja=-inf,zh=-5",
            help="Added to a language's tokens: ja zh ko en ru ar th hi he el.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    suppress: Annotated[
        list[str] | None,
        typer.Option("--suppress", metavar="ID,ID,…", help="Tokens never to say.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text; repeatable.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Default: a fresh one, reported.", rich_help_panel=SAMPLING_PANEL)
    ] = None,
    draft: Annotated[
        DraftKind, typer.Option("--draft", help="Who drafts.", rich_help_panel=DRAFT_PANEL)
    ] = DraftKind.auto,
    draft_model: DraftModel = None,
    head: Head = None,
    draft_tokens: Annotated[
        str, typer.Option("--draft-tokens", metavar="N|auto", help="Drafted per round.", rich_help_panel=DRAFT_PANEL)
    ] = "auto",
    accept: Annotated[
        Acceptance,
        typer.Option(
            "--accept",
            help="coupled: same text per seed; rejection: same distribution.",
            rich_help_panel=DRAFT_PANEL,
        ),
    ] = Acceptance.coupled,
    device: Device = "auto",
    dtype: Dtype = Precision.auto,
    quantize: Quantize = Quantization.auto,
    max_context: MaxContext = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="A table on stderr: what each arm did.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt: the text streams to stdout, one line about it goes to stderr."""
    _refuse_contradictions(raw=raw, system=system, draft=draft, draft_model=draft_model, head=head, stop=stop or [])
    require_positive("--max-tokens", max_tokens)
    require_positive("--max-context", max_context)
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_logit_bias(logit_bias or []),
        "suppress": parse_suppress(suppress or []),
        "seed": seed,
    }
    options = sampling | {
        "system": system,
        "raw": raw,
        "max_tokens": max_tokens,
        "lang_bias": lang_bias,
        "stop": stop or [],
        "draft": draft.value,
        "draft_tokens": parse_draft_tokens(draft_tokens),
        "accept": accept.value,
    }
    text = read_prompt(prompt, prompt_file)
    _check_sampling(sampling, lang_bias)

    import forerun

    progress = terminal_progress(quiet)
    loaded = forerun.load(
        model,
        device=device,
        dtype=dtype.value,
        quantize=quantize.value,
        max_context=max_context,
        draft_model=draft_model,
        head="auto" if head is None else head,
        progress=progress,
    )
    with forerun.stream(loaded, text, progress=progress, **options) as answer:
        finished = _follow(answer, show=not as_json)
        response = answer.response()
    if as_json:
        _print_json(response)
    _report(response, model, quiet=quiet or as_json, sampled=temperature > 0, rejection=accept is Acceptance.rejection)
    if explain:
        print_explanation(response)
    if not finished:
        raise KeyboardInterrupt


def _refuse_contradictions(
    *, raw: bool, system: str | None, draft: DraftKind, draft_model: str | None, head: str | None, stop: list[str]
) -> None:
    """Flags that would be ignored are errors, found before the model loads."""
    if raw and system is not None:
        raise ForerunError("--raw uses no chat template, so --system has nowhere to go: drop one of them")
    if draft is DraftKind.model and draft_model is None:
        raise ForerunError("--draft model needs a model: name it with --draft-model")
    if draft in (DraftKind.off, DraftKind.lookup, DraftKind.mtp) and draft_model is not None:
        raise ForerunError(f"--draft {draft.value} uses no draft model: drop --draft-model, or use --draft model")
    if draft not in (DraftKind.auto, DraftKind.mtp) and head is not None:
        raise ForerunError(f"--draft {draft.value} uses no MTP head: drop --head, or use --draft mtp")
    if head is not None and draft_model is not None:
        raise ForerunError("--head and --draft-model name two drafters: drop one of them")
    if head == "":
        raise ForerunError("--head is empty: give the folder of an MTP head")
    if "" in stop:
        raise ForerunError("--stop is empty: give the text to stop at")


def _check_sampling(sampling: Mapping[str, Any], lang_bias: str | None) -> None:
    """The library checks these too, but a typing mistake should not cost a model load."""
    from forerun.sample.parameters import SamplingParams

    SamplingParams(**{name: value for name, value in sampling.items() if value is not None})
    if lang_bias is not None:
        from forerun.sample.language import parse_language_bias

        parse_language_bias(lang_bias)


def _follow(answer: Generation, show: bool) -> bool:
    """Write each piece of text at once. Ctrl-C ends the answer, not the report about it: then the result is False."""
    last = "\n"

    def write(chunks: Iterable[Chunk]) -> None:
        nonlocal last
        for chunk in chunks:
            if show and chunk.text:
                last = chunk.text[-1]
                sys.stdout.write(chunk.text)
                sys.stdout.flush()

    try:
        write(answer)
        finished = True
    except KeyboardInterrupt:
        write(answer.ready_chunks())
        finished = False
    if last != "\n":
        sys.stdout.write("\n")
        sys.stdout.flush()
    return finished


def _print_json(response: Response) -> None:
    facts = response.to_dict()
    print(json.dumps({key: facts[key] for key in JSON_KEYS}, ensure_ascii=False), flush=True)


def _report(response: Response, model: str, *, quiet: bool, sampled: bool, rejection: bool) -> None:
    """The line of statistics, and what went wrong. Only the former is silenced by --quiet."""
    if not quiet:
        print(statistics_line(response, sampled=sampled, rejection=rejection), file=sys.stderr)
    for warning in response.warnings:
        print(f"forerun: warning: {warning}", file=sys.stderr)
    if not response.guaranteed and not rejection:  # who chose rejection gave the promise up
        print(
            f"forerun: WARNING: this text is NOT guaranteed to equal plain decoding here; see forerun check {model}",
            file=sys.stderr,
        )
