"""Files of a model folder, read with suspicion: the folder may come from a stranger."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FILE_BYTES = 2**30  # of a weight file that is written: in memory until then, with the first tensor of the next
JSON_LIMIT = 64 * 2**20  # the index of the largest public model has a few megabytes


def file_inside(folder: Path, name: str) -> Path | None:
    """The file `name` of the folder, or None when there is none; a name or link that leaves the folder is refused."""
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise ForerunError(f"{folder}: refuses the file name {name[:80]!r}, which points outside the model folder")
    path = folder / name
    try:
        if not path.is_file():
            return None
    except OSError:  # a name too long for the file system
        return None
    parent = path.resolve().parent
    if parent not in (folder.resolve(), _hub_blobs(folder)):
        raise ForerunError(f"{path} is a link that leaves the model folder; put the file itself there")
    return path


def _hub_blobs(folder: Path) -> Path | None:
    """The hub cache keeps a snapshot's files as links into `blobs`, beside the folder `snapshots`."""
    snapshots = folder.resolve().parent
    return snapshots.parent / "blobs" if snapshots.name == "snapshots" else None


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON object from the folder, or None when the file is missing."""
    path = file_inside(folder, name)
    if path is None:
        return None
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise ForerunError(f"{path} is larger than {JSON_LIMIT >> 20} MiB, which no model needs")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ForerunError(f"{path} is not valid JSON ({first_line(error)}); download it again") from error
    except OSError as error:
        raise ForerunError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ForerunError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; an error that says what is there instead when there are none."""
    single = file_inside(folder, SINGLE)
    if single is not None:
        return [single]
    index = read_json(folder, INDEX)
    if index is not None:
        return _shards(folder, index)
    present = _files(folder)
    found = [name for name in present if name.endswith(".safetensors")]
    if len(found) == 1:
        only = file_inside(folder, found[0])
        assert only is not None
        return [only]
    raise ForerunError(_no_weights(folder, found, present))


def _files(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ForerunError(f"cannot read the folder {folder}: {error.strerror}") from error


def _shards(folder: Path, index: dict[str, Any]) -> list[Path]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ForerunError(f"{folder / INDEX} has no 'weight_map'; download it again")
    names = sorted({name if isinstance(name, str) else "" for name in weight_map.values()})
    paths = []
    for name in names:
        if not name.endswith(".safetensors"):
            raise ForerunError(
                f"{folder / INDEX} names {name[:80]!r} as a weight file; only .safetensors files are read"
            )
        path = file_inside(folder, name)
        if path is None:
            raise ForerunError(f"{folder}: the weight file {name[:80]} is missing; download the model again")
        paths.append(path)
    return paths


def _no_weights(folder: Path, safetensors: list[str], present: list[str]) -> str:
    if safetensors:
        return f"{folder} holds {len(safetensors)} .safetensors files but no {INDEX} that says which belong together"
    pickles = [name for name in present if name.endswith(PICKLES)]
    if pickles:
        return (
            f"{folder} holds only pickle weights ({pickles[0]}), which can run code when opened and are never read; "
            "use a safetensors version of the model"
        )
    ggufs = [name for name in present if name.endswith(".gguf")]
    if ggufs:
        return f"{folder} holds GGUF files; give the file itself: {folder / ggufs[0]}"
    return f"{folder} holds no weights (model.safetensors or {INDEX})"


@contextmanager
def system_errors(file: Path) -> Iterator[None]:
    """What the system refuses inside the block is an OSError, as it is for every other file.

    Libraries written in Rust tell such errors from their own by their text alone.
    """
    try:
        yield
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """As safetensors, which leaves the file to its owner alone: it gets the permissions of every other new file."""
    from safetensors.torch import save_file

    with system_errors(file):
        save_file(dict(tensors), file, metadata={"format": "pt"})
    _set_mode(file, 0o666)


def save_in_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> tuple[int, int]:
    """All tensors in files of about a gigabyte. Returns how many tensors there are, and their bytes.

    Several files get an index, as Hugging Face has it.
    """
    places: dict[str, int] = {}
    pending: dict[str, Tensor] = {}
    files = total = held = 0

    def save() -> None:
        nonlocal files, held
        files += 1
        save_tensors(pending, folder / f"{files}.part")
        places.update(dict.fromkeys(pending, files))
        pending.clear()
        held = 0

    for name, tensor in tensors:
        if held and held + tensor.nbytes > FILE_BYTES:
            save()
        pending[name] = tensor.contiguous()
        held += tensor.nbytes
        total += tensor.nbytes
    save()
    final = {n: SINGLE if files == 1 else f"model-{n:05}-of-{files:05}.safetensors" for n in range(1, files + 1)}
    for number, name in final.items():
        os.rename(folder / f"{number}.part", folder / name)
    if files > 1:
        weight_map = {name: final[number] for name, number in places.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(places), total


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name `target` when the block ends: complete, on the disk, or not at all.

    What has that name already must be an empty folder.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        for file in work.iterdir():  # a power cut cannot leave a complete-looking folder of empty files
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        _set_mode(work, 0o777)  # as mkdir makes it; a temporary folder is its owner's alone
        if target.exists():
            target.rmdir()
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _set_mode(path: Path, most: int) -> None:
    """The permissions that new files of this process get of these."""
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    with suppress(OSError):  # some file systems have no permissions
        path.chmod(most & ~mask)


def write_json(file: Path, value: object) -> None:
    """Readable; ASCII alone, since names of files and texts of strangers may hold what UTF-8 cannot say."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
