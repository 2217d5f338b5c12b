"""Draws what a command printed as an SVG picture: `python scripts/record_demo.py docs/demo.svg COMMAND…`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(picture: str, *command: str) -> None:
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Text("$ " + shlex.join(["forerun", *command[1:]]), style="bold green"))
    lines = ran.stdout.rstrip().splitlines()
    console.print(Text("\n".join(lines[:-1])))
    console.print(Text(lines[-1], style="dim"))
    Path(picture).write_text(console.export_svg(title="forerun"))


if __name__ == "__main__":
    main(*sys.argv[1:])
