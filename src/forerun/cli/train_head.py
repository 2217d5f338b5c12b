"""`forerun train-head`: a drafting head for a model that has none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.flags import ModelArgument, Quiet, model_option, panel, require_positive
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.home import expanded

data, training = panel("Data"), panel("Training")
DEFAULT_MINUTES = 30.0
SEEDS = 2**32


def train_head(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the head to.")],
    prompts: Annotated[
        list[Path] | None,
        data(help="File or folder of prompts (text, JSON lines or list); may be given again. Default: built-in."),
    ] = None,
    texts: Annotated[Path | None, data(help="Folder of texts for the built-in tasks.")] = None,
    count: Annotated[int, data(help="Prompts to answer at most.")] = 40_000,
    answer_tokens: Annotated[int, data(help="Longest answer.")] = 320,
    evaluation: Annotated[Path | None, data(help="JSON lines to measure on; default: built-in.")] = None,
    minutes: Annotated[float | None, training(help="For everything; default: 30, or what --steps take.")] = None,
    steps: Annotated[int | None, training(help="Optimiser steps.")] = None,
    start_from: Annotated[Path | None, training(help="Head to train further; may become wider.")] = None,
    rate: Annotated[float | None, training(help="Highest learning rate; default: 3e-3, or 5e-4 from a head.")] = None,
    draft_vocab: Annotated[
        str, training(metavar="N|auto", help="Ids the head may draft; auto: few, or as --start-from.")
    ] = "auto",
    taps: Annotated[str, training(metavar="I,I,…|auto|none", help="Layers whose input it reads.")] = "auto",
    intermediate: Annotated[
        int | None, training(help="Feed-forward width; default: the model's, or as --start-from.")
    ] = None,
    seed: Annotated[int, training(help="Of prompts and training.")] = 0,
    work: Annotated[Path | None, training(help="Where to keep data and checkpoints.")] = None,
    device: Annotated[str, model_option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    quiet: Quiet = False,
) -> None:
    """Train a head on answers the model writes itself. Run it again to go on after an interruption."""
    counts = {"--count": count, "--answer-tokens": answer_tokens, "--steps": steps, "--intermediate": intermediate}
    for name, value in counts.items():
        require_positive(name, value)
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ForerunError("--minutes must be above 0")
    if rate is not None and not 0 < rate < 1:
        raise ForerunError("--rate must be between 0 and 1")
    if not 0 <= seed < SEEDS:  # other generators take other numbers, but only when answers have been written
        raise ForerunError(f"--seed {seed}: give a whole number from 0 to {SEEDS - 1}")
    size = _draft_vocab(draft_vocab)
    layers = _taps(taps)
    out, prompts = expanded(out), [expanded(path) for path in prompts or ()]
    texts, evaluation, start_from, work = (
        None if path is None else expanded(path) for path in (texts, evaluation, start_from, work)
    )

    if prompts and texts is None:
        from forerun.train.prompts.files import read_prompts

        read_prompts(prompts)  # what cannot be used is refused before a model is loaded for it
    from forerun.train.run import train_head as run
    from forerun.train.settings import Settings

    settings = Settings(
        seed=seed,
        minutes=minutes if minutes is not None or steps is not None else DEFAULT_MINUTES,
        steps=steps,
        prompts=count,
        answer_tokens=answer_tokens,
        rate=rate,
        draft_vocab=size,
        start_from=None if start_from is None else str(start_from),
        taps=layers,
        intermediate=intermediate,
    )

    def log(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr)

    report = run(
        model,
        out,
        settings,
        device=device,
        prompts=prompts,
        texts=texts,
        evaluation=evaluation,
        work=work,
        progress=terminal_progress(quiet),
        log=log,
    )
    from forerun.train.card import figures

    print("\n".join(figures(report)))


def _draft_vocab(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 2:
        raise ForerunError(f"--draft-vocab must be auto or a number of ids, not {text!r}")
    return int(text)


def _taps(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    parts = [] if text == "none" else text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ForerunError(f"--taps must be auto, none or layer numbers like 3,15, not {text!r}")
    return tuple(sorted({int(part) for part in parts}))
