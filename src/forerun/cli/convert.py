"""`forerun convert`: rewrite a model as forerun loads it fastest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from forerun.cli.flags import MODEL_HELP, Quiet
from forerun.cli.terminal_progress import terminal_progress


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=f"{MODEL_HELP}.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    quantize: Annotated[
        Literal["none", "int8", "q8_0", "q4_0"],
        typer.Option(
            "--quantize",
            help="int8: 8 bits with a scale for each row; q8_0, q4_0: blocks of 8 or 4 bits, as in GGUF files.",
        ),
    ] = "none",
    quiet: Quiet = False,
) -> None:
    """Write a folder that forerun loads fast; an MTP head is checked and kept."""
    from forerun.conversion import convert as run

    done = run(source, target, quantize=quantize, progress=terminal_progress(quiet))
    for note in done.notes:
        print(f"forerun: {note}", file=sys.stderr)
    print(f"{done.folder}: {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
