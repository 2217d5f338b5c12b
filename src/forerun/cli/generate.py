"""`forerun generate`: stream an answer to stdout and say on stderr how it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.explanation import print_explanation, statistics_line
from forerun.cli.flags import AsJson, KeepingLoadOptions, ModelName, Quiet, output_option, panel, with_flags
from forerun.cli.generation_flags import check_options, with_generation_flags
from forerun.cli.prompt import read_prompt
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.options import PROMPT, GenerationOptions

if TYPE_CHECKING:
    from forerun.language_model import Generation
    from forerun.response import Chunk, Response

prompt_option = panel(PROMPT)
JSON_KEYS = (
    *("text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "rounds"),
    *("drafted", "accepted"),
    *("seconds", "tokens_per_second", "draft", "accept", "guaranteed", "proof", "seed"),
    *("arms", "tokens_per_round", "accepted_per_position", "seconds_saved"),
)


@with_generation_flags
@with_flags("loading", KeepingLoadOptions)
def generate(
    *,
    model: ModelName = "smollm2",
    prompt: Annotated[str | None, prompt_option("--prompt", "-p", help="What to answer; - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, prompt_option(help="Read the prompt from a file.")] = None,
    options: GenerationOptions,
    loading: KeepingLoadOptions,
    explain: Annotated[bool, output_option("--explain", help="A table on stderr: what each arm did.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt: the text streams to stdout, one line about it goes to stderr."""
    _refuse_contradictions(options, loading)
    loading.check()
    text = read_prompt(prompt, prompt_file)
    check_options(options)

    import forerun

    progress = terminal_progress(quiet)
    with forerun.load(model, progress=progress, **loading.arguments()) as loaded:
        with forerun.stream(loaded, text, progress=progress, **options.to_dict()) as answer:
            finished = _follow(answer, show=not as_json)
            response = answer.response()
        if as_json:
            _print_json(response)
        rejection = options.accept == "rejection"
        _report(response, model, quiet=quiet or as_json, sampled=bool(options.temperature), rejection=rejection)
        if explain:
            print_explanation(response)
    if not finished:
        raise KeyboardInterrupt
    if response.proof is not None and not response.proof.identical:
        raise typer.Exit(1)


def _refuse_contradictions(options: GenerationOptions, loading: KeepingLoadOptions) -> None:
    """Flags that would be ignored are errors, found before the model loads."""
    draft, draft_model, head = options.draft, loading.draft_model, loading.head
    if options.raw and options.system is not None:
        raise ForerunError("--raw uses no chat template, so --system has nowhere to go: drop one of them")
    if draft == "model" and draft_model is None:
        raise ForerunError("--draft model needs a model: name it with --draft-model")
    if draft in ("off", "lookup") and draft_model is not None:
        raise ForerunError(f"--draft {draft} uses no draft model: drop --draft-model, or use --draft model")
    if draft not in ("auto", "mtp") and head is not None:
        raise ForerunError(f"--draft {draft} uses no MTP head: drop --head, or use --draft mtp")
    if "" in options.stops:
        raise ForerunError("--stop is empty: give the text to stop at")


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
    if response.proof is not None and not (quiet and response.proof.identical):
        print(f"forerun: {response.proof.line()}", file=sys.stderr)
    for warning in response.warnings:
        print(f"forerun: warning: {warning}", file=sys.stderr)
    if not response.guaranteed and not rejection:  # who chose rejection gave the promise up
        print(
            f"forerun: WARNING: this text is NOT guaranteed to equal plain decoding here; see forerun check {model}",
            file=sys.stderr,
        )
