"""Where forerun keeps what it converts."""

from __future__ import annotations

import os
from pathlib import Path


def forerun_home() -> Path:
    """`$FORERUN_HOME`, or `~/.cache/forerun`. The folder may not exist yet."""
    chosen = os.environ.get("FORERUN_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "forerun"
