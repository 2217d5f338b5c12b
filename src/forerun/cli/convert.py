"""`forerun convert`: rewrite a model as forerun loads it fastest."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import Quiet
from forerun.cli.terminal_progress import terminal_progress


class Stored(StrEnum):
    """How weights are written."""

    none = "none"
    int8 = "int8"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, GGUF file, hub id, or built-in name.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    quantize: Annotated[
        Stored, typer.Option("--quantize", help="int8: round as loading would, for a file of half the size.")
    ] = Stored.none,
    quiet: Quiet = False,
) -> None:
    """Write a folder that forerun loads fast; an MTP head is checked and kept."""
    from forerun.conversion import convert as run

    done = run(source, target, quantize=quantize.value, progress=terminal_progress(quiet))
    for note in done.notes:
        print(f"forerun: {note}", file=sys.stderr)
    print(f"{done.folder}: {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
