"""GGUF files, converted once into a folder like any other model's and kept under forerun's home.

The folder appears under its final name complete or not at all: it is written beside it and renamed. A lock lets one
process convert while others wait. Its name carries the identity of the source: a changed file is converted anew, and
what was made of it before goes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.progress import NullProgress, Progress
from forerun.weights.folder import new_folder, write_json
from forerun.weights.gguf_config import config_from
from forerun.weights.gguf_gemma import ASSISTANT
from forerun.weights.gguf_header import read_header
from forerun.weights.gguf_tensors import converted_bytes, read_rope_factors, write_tensors
from forerun.weights.gguf_tokenizer import generation_config, write_tokenizer

FORMAT = 5  # raise it when the conversion changes, and every cached folder is made again
MANIFEST = "forerun.json"
HASHED_BYTES = 2**20
LEFTOVER = re.compile(r"\.(.+-[0-9a-f]{16})\.[^.]+")  # see `_cache_name` and `new_folder`


def convert_gguf(file: Path, home: Path, progress: Progress | None = None) -> Path:
    """The folder with the converted model; made on the first call, found again by later ones within milliseconds."""
    cache = home / "gguf"
    folder = cache / _cache_name(file)
    try:
        if _is_complete(folder):
            return folder
        return _convert_once(file, folder, progress or NullProgress())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ForerunError(
            f"cannot convert {file} into {cache}: {reason}; make room there or set FORERUN_HOME to another folder"
        ) from error


def _convert_once(file: Path, folder: Path, progress: Progress) -> Path:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if _is_complete(folder):  # another process made it while this one waited
            return folder
        _remove_leftovers(folder)
        with new_folder(folder) as work:
            _write(file, work, progress)
            if folder.name != _cache_name(file):
                raise ForerunError(f"{file} changed while it was being converted; try again")
            if folder.exists():  # present but not complete: files were removed or cut short
                shutil.rmtree(folder)
    _remove_older(file, folder)
    return folder


def _write(file: Path, work: Path, progress: Progress) -> None:
    header = read_header(file)
    config = config_from(header, str(file), read_rope_factors(header, file))
    _check_room(work, converted_bytes(header), file)
    tokenizer = None
    if header.metadata["general.architecture"] != ASSISTANT:  # which only sees its target's tokens
        tokenizer = write_tokenizer(header, file, work, config["vocab_size"])
    write_tensors(header, file, work, config, progress)
    write_json(work / "config.json", config)
    write_json(work / "generation_config.json", generation_config(header, tokenizer))
    files = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    source = {"source": file.name, "path": str(file.absolute())}
    write_json(work / MANIFEST, {"format": FORMAT, **source, "files": files})


def _cache_name(file: Path) -> str:
    """A readable stem and the source's identity: size, time of change and a hash of its beginning."""
    try:
        status = file.stat()
        with file.open("rb") as stream:
            beginning = stream.read(HASHED_BYTES)
    except OSError as error:
        raise ForerunError(f"cannot read {file}: {error.strerror}") from error
    identity = f"{FORMAT} {status.st_size} {status.st_mtime_ns} ".encode() + beginning
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", file.stem)[:60].lstrip(".")
    return f"{stem}-{hashlib.sha256(identity).hexdigest()[:16]}"


def _is_complete(folder: Path) -> bool:
    """Whether every file that was written is still there in full."""
    try:
        files = _manifest(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, KeyError, AttributeError, TypeError, ValueError):
        return False


def _manifest(folder: Path) -> dict[str, Any]:
    """What was noted when the folder was made; nothing where that cannot be read."""
    try:
        noted = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _remove_leftovers(made: Path) -> None:
    """What interrupted conversions left behind, of any file: as large as a model, and used by nobody.

    The lock of `made` is held; another one that can be had is that of a conversion which ended.
    """
    from filelock import FileLock, Timeout

    for leftover in made.parent.iterdir():
        if not (found := LEFTOVER.fullmatch(leftover.name)):
            continue
        name = found[1]
        lock = nullcontext() if name == made.name else FileLock(made.with_name(f"{name}.lock"), timeout=0)
        with suppress(Timeout), lock:
            shutil.rmtree(leftover, ignore_errors=True)


def _remove_older(file: Path, made: Path) -> None:
    """Folders that were made of this file before it changed, or in a form that is not read any more.

    They are as large as the model. Folders of the first two forms do not say where their source was: the name decides.
    One of a later form belongs to a later version of forerun, which would have to make it again.
    """
    for folder in made.parent.iterdir():
        noted = _manifest(folder) if folder != made else {}
        unread = noted.get("source") == file.name and "path" not in noted
        later = isinstance(noted.get("format"), int) and noted["format"] > FORMAT
        if not later and (unread or noted.get("path") == str(file.absolute())):
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name(folder.name + ".lock").unlink(missing_ok=True)


def _check_room(folder: Path, needed: int, file: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ForerunError(
            f"converting {file} needs {needed / 1e9:.1f} GB in {folder.parent}, where {free / 1e9:.1f} GB are free; "
            "make room or set FORERUN_HOME to another folder"
        )
