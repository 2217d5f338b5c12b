"""Where forerun keeps what it converts, and what `~` means in the names of folders."""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import ForerunError


def forerun_home() -> Path:
    """`$FORERUN_HOME`, or `~/.cache/forerun`. The folder may not exist yet."""
    home = expanded(os.environ.get("FORERUN_HOME") or "~/.cache/forerun")
    if home.parts[:1] and home.parts[0].startswith("~"):
        raise ForerunError(f"{home.parts[0]} is no home folder here: set FORERUN_HOME to a folder")
    return home


def expanded(path: str | Path) -> Path:
    """With the home folder in place of `~`; where there is none the name stays as it is, and will not be found."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
