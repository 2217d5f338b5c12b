"""`forerun convert`: a checkpoint rewritten as forerun loads it fastest, its head checked and kept.

What forerun does not read is left out; everything else keeps its bits, or is rounded to 8 bits with a scale for each
row, or to blocks of 8 or 4 bits. What other programs quantised is decoded. Towers that see and hear are copied as
they are. The folder appears complete or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.home import expanded
from forerun.kernels.formats import FORMATS
from forerun.kernels.matrix import round_to_int8
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.progress import NullProgress, Progress
from forerun.weights.assistants import assistant_beside, is_assistant
from forerun.weights.checkpoint import SCALE, Checkpoint, open_checkpoint
from forerun.weights.described import described
from forerun.weights.find import find
from forerun.weights.fingerprint import SOURCE_HASH, fingerprint
from forerun.weights.folder import INDEX, file_inside, new_folder, read_json, save_in_files, system_errors, write_json
from forerun.weights.generation_config import NAME as GENERATION_CONFIG
from forerun.weights.schemes import BLOCK_FORMATS, BLOCKS, INT8, KEYS, Scheme, scheme_of
from forerun.weights.tokenizer import load_tokenizer

SIDE_FILES = (".json", ".txt", ".jinja", ".model", ".md")  # tokenizer, templates, licence
QUANTIZE = ("none", "int8", *BLOCK_FORMATS)
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
    if quantize not in QUANTIZE:
        raise ForerunError(f"quantize must be {', '.join(QUANTIZE[:-1])} or {QUANTIZE[-1]}, not {quantize!r}")
    progress = progress or NullProgress()
    target = expanded(target).absolute()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ForerunError(f"{target} exists and is not an empty folder: name a new one")
        checkpoint = open_checkpoint(find(source, progress=progress))
        if quantize != "none" and own_scheme(checkpoint) is not None:
            raise ForerunError(f"{checkpoint.path} is quantised already: convert it without --quantize")
        names, notes = examine(checkpoint)
        count, size = write_folder(checkpoint, names, target, quantize, progress)
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
    checkpoint: Checkpoint, names: list[str], target: Path, quantize: str, progress: Progress
) -> tuple[int, int]:
    """Beside the target first, then under its name. Returns how many tensors were written, and their bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def stored() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = checkpoint.raw(name)
            # Loading rounds what it asks for as a matrix; not routers, towers, or what decides about a recurrent state.
            matrix = name in checkpoint.matrices
            if matrix and quantize in FORMATS and tensor.shape[-1] % FORMATS[quantize].weights == 0:
                tensor = encoded(tensor, quantize)
            elif matrix and quantize == "int8":
                values, scale = round_to_int8(tensor.flatten(0, -2))
                yield name + SCALE, scale.view(tensor.shape[:-1])
                tensor = values.view(tensor.shape)
            yield name, tensor
            task.advance()

    with new_folder(target) as work:
        with progress.task("converting weights", len(names)) as task:
            count, size = save_in_files(stored(), work)
        write_side_files(checkpoint.path, work)
        name_known_class(work)
        config = without_scheme(checkpoint.config) | {SOURCE_HASH: fingerprint(checkpoint)}
        scheme = own_scheme(checkpoint)
        if quantize in FORMATS:
            config["quantization_config"] = {"quant_method": BLOCKS, "format": quantize}
        elif quantize == "int8":
            config["quantization_config"] = {"quant_method": INT8}
        elif scheme is not None and scheme.method in (INT8, BLOCKS):
            config["quantization_config"] = dict(scheme.settings)
        write_json(work / "config.json", config)
    return count, size


def encoded(tensor: Tensor, form: str) -> Tensor:
    """[..., out, in] in blocks: [..., out, bytes of a row] uint8."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    values = tensor.float().contiguous().numpy()
    if not bool(tensor.isfinite().all()):
        raise ForerunError("the weights hold values that are infinite or not a number: the checkpoint is broken")
    return torch.from_numpy(quantize(values, GGMLQuantizationType[form.upper()]))


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says nothing about the way its weights were stored."""
    kept = {key: value for key, value in config.items() if key not in KEYS}
    nested = config.get("text_config")
    return kept | ({"text_config": without_scheme(nested)} if isinstance(nested, Mapping) else {})


def own_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """How a folder's weights are quantised, if they are."""
    return scheme_of(checkpoint.config, str(checkpoint.path)) if checkpoint.path.is_dir() else None


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


def write_side_files(source: Path, work: Path) -> None:
    """The tokenizer and what else describes the model; never weights, never code."""
    if source.is_file():
        write_json(work / GENERATION_CONFIG, described(source, GENERATION_CONFIG))
        if not is_assistant(source):  # which only sees its target's tokens
            with system_errors(work):
                load_tokenizer(source).save(work)
        return
    for file in sorted(source.iterdir()):
        known = file.suffix in SIDE_FILES or file.name.upper().startswith(("LICENSE", "NOTICE"))
        written = file.name in ("config.json", INDEX) or (work / file.name).exists()
        if not known or written or file_inside(source, file.name) is None:  # which refuses links to files elsewhere
            continue
        if file.stat().st_size <= SIDE_LIMIT:
            shutil.copyfile(file, work / file.name)
