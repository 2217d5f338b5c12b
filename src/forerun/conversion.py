"""`forerun convert`: a checkpoint rewritten as forerun loads it fastest, its head checked and kept.

What forerun does not read is left out; everything else keeps its bits, or is rounded to 8 bits exactly as loading would
do it. Towers that see and hear are copied as they are. The folder appears complete or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.matrix import round_to_int8
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.progress import NullProgress, Progress
from forerun.weights.assistants import assistant_beside
from forerun.weights.checkpoint import SCALE, Checkpoint, open_checkpoint
from forerun.weights.config import OWN_METHOD
from forerun.weights.find import find
from forerun.weights.fingerprint import SOURCE_HASH, fingerprint
from forerun.weights.folder import INDEX, file_inside, new_folder, read_json, save_in_files, write_json
from forerun.weights.gguf_convert import MANIFEST
from forerun.weights.home import expanded

SIDE_FILES = (".json", ".txt", ".jinja", ".model", ".md")  # tokenizer, templates, licence
SIDE_LIMIT = 200 * 2**20


@dataclass(slots=True)
class Conversion:
    """What was done."""

    folder: Path
    tensors: int
    bytes: int
    notes: list[str]


def convert(source: str, target: Path, *, quantize: str = "none", progress: Progress | None = None) -> Conversion:
    """Rewrite the model `source` (folder, GGUF file, hub id, built-in name) into the new folder `target`."""
    if quantize not in ("none", "int8"):
        raise ForerunError(f"quantize must be none or int8, not {quantize!r}")
    progress = progress or NullProgress()
    target = expanded(target).absolute()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ForerunError(f"{target} exists and is not an empty folder: name a new one")
        checkpoint = open_checkpoint(find(source, progress=progress))
        if quantize == "int8" and checkpoint.config.get("quantization_config"):
            raise ForerunError(f"{checkpoint.path} is in 8 bits already: convert it without --quantize")
        names, notes = examine(checkpoint)
        count, size = write_folder(checkpoint, names, target, quantize == "int8", progress)
        return Conversion(target, count, size, notes)
    except OSError as error:
        raise ForerunError(f"cannot write {target}: {error.strerror or type(error).__name__}") from error


def examine(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Names of the tensors forerun reads, the decoder's shapes checked, and what a user should know about them."""
    notes = []
    # Built on the device without memory: names and shapes are checked by the code that loads, nothing is read.
    decoder = build(checkpoint, ReferenceKernels(), torch.device("meta"), torch.float32, NullProgress())
    try:
        if decoder.native_head() is not None:
            count = sum(name.startswith("mtp.") for name in checkpoint.names())
            notes.append(f"its MTP head is complete ({count} tensors) and kept")
    except ForerunError as error:
        notes.append(f"no usable MTP head: {error}")
    towers = decoder.config.towers
    left = checkpoint.leftovers(lambda name: name.startswith(("mtp.", *towers)))
    if left:
        notes.append(f"{len(left)} tensors that forerun does not read are left out ({left[0]}, …)")
    kept = sorted(checkpoint.names() - set(left))
    if seeing := sum(name.startswith(towers) for name in kept):
        notes.append(f"{seeing} tensors that turn pictures or sound into rows are copied as they are")
    if (assistant := assistant_beside(checkpoint.path)) is not None:
        notes.append(f"the assistant {assistant} is a model of its own and stays where it is: --draft-model names it")
    return kept, notes


def write_folder(
    checkpoint: Checkpoint, names: list[str], target: Path, rounded: bool, progress: Progress
) -> tuple[int, int]:
    """Beside the target first, then under its name. Returns how many tensors were written, and their bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def stored() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = checkpoint.raw(name)
            # Loading rounds what it asks for as a matrix; not routers, towers, or what decides about a recurrent state.
            if rounded and name in checkpoint.matrices:
                values, scale = round_to_int8(tensor.flatten(0, -2))
                yield name + SCALE, scale.view(tensor.shape[:-1])
                tensor = values.view(tensor.shape)
            yield name, tensor
            task.advance()

    with new_folder(target) as work:
        with progress.task("converting weights", len(names)) as task:
            count, size = save_in_files(stored(), work)
        copy_side_files(checkpoint.path, work)
        name_known_class(work)
        config = dict(checkpoint.config) | {SOURCE_HASH: fingerprint(checkpoint)}
        if rounded:
            config["quantization_config"] = {"quant_method": OWN_METHOD}
        write_json(work / "config.json", config)
    return count, size


def name_known_class(work: Path) -> None:
    """transformers 5 writes a tokenizer's class and extra tokens in a way that transformers 4 cannot read."""
    settings = read_json(work, "tokenizer_config.json")
    if settings is None or settings.get("tokenizer_class") != "TokenizersBackend":
        return
    extra = settings.pop("extra_special_tokens", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if extra is not None:
        settings["additional_special_tokens" if isinstance(extra, list) else "extra_special_tokens"] = extra
    write_json(work / "tokenizer_config.json", settings)


def copy_side_files(source: Path, work: Path) -> None:
    """The tokenizer and what else describes the model; never weights, never code."""
    for file in sorted(source.iterdir()):
        known = file.suffix in SIDE_FILES or file.name.upper().startswith(("LICENSE", "NOTICE"))
        written = file.name in ("config.json", INDEX, MANIFEST) or (work / file.name).exists()
        if not known or written or file_inside(source, file.name) is None:  # which refuses links to files elsewhere
            continue
        if file.stat().st_size <= SIDE_LIMIT:
            shutil.copyfile(file, work / file.name)
