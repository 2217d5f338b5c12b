"""Where the prompt comes from: the command line, a file, or standard input."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from forerun.errors import ForerunError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Exactly one source must be given. One line break at the end of a file or of stdin is not part of the prompt."""
    if prompt is not None and prompt_file is not None:
        raise ForerunError("--prompt and --prompt-file exclude each other: give one of them")
    if prompt_file is not None:
        text = _decode(_read_file(prompt_file), str(prompt_file))
    elif prompt == "-":
        text = _decode(sys.stdin.buffer.read(), "standard input")
    elif prompt is not None:
        text = require_unicode(prompt, "--prompt")
    else:
        raise ForerunError(_no_prompt())
    if not text:
        raise ForerunError("the prompt is empty: give some text")
    return text


def _no_prompt() -> str:
    if sys.stdin.isatty():
        return "no prompt: give one with -p TEXT or --prompt-file FILE"
    return "no prompt: use -p - to read it from standard input, or give -p TEXT or --prompt-file FILE"


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ForerunError(f"cannot read the prompt file {path}: {error.strerror}") from error


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ForerunError(f"{source} is not UTF-8 text (byte {error.start}): convert it first") from error
    return text.removesuffix("\n").removesuffix("\r")


def require_unicode(text: str, source: str) -> str:
    """The text, unless bytes that are none came with it. UTF-8 stays UTF-8 where the locale says ASCII."""
    with contextlib.suppress(UnicodeEncodeError):
        text.encode("utf-8")
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise ForerunError(f"{source} is not UTF-8 text: convert it first") from error
