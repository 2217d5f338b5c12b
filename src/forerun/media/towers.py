"""Towers: transformers' own modules, with weights that come through forerun's reader of checkpoints; their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forerun.errors import ForerunError
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.folder import read_json

TOGETHER = "processor_config.json"  # settings of newer folders: an object for each processor
APART = {  # and of older ones
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}
PREFIXES = ("model.", "")  # of a whole checkpoint's tensors, in either layout
DEPTH = 512  # layers that a tower may have: far more than any


def processor_settings(checkpoint: Checkpoint, name: str) -> ConfigReader:
    """Settings of "image_processor", "video_processor" or "feature_extractor"; empty where a folder has none."""
    together = ConfigReader(read_json(checkpoint.path, TOGETHER) or {}, str(checkpoint.path / TOGETHER))
    if name in together:
        return together.part(name)
    return ConfigReader(read_json(checkpoint.path, APART[name]) or {}, str(checkpoint.path / APART[name]))


def tower_config(checkpoint: Checkpoint, part: str, kind: Any) -> Any:
    """A transformers config of class `kind` from `part` of config.json."""
    reader = checkpoint.reader.part(part)
    for name in ("num_hidden_layers", "depth"):
        if name in reader:
            reader.integer(name, high=DEPTH)
    with described(checkpoint, part):
        return kind.from_dict(dict(reader.values))


@contextmanager
def described(checkpoint: Checkpoint, part: str) -> Iterator[None]:
    """What transformers raises in the block, each class in its own way, becomes a line about `part` of config.json."""
    try:
        yield
    except Exception as error:
        raise ForerunError(
            f"{checkpoint.path / 'config.json'}: {part} does not describe anything that can be built"
        ) from error


def load_tower(
    checkpoint: Checkpoint, part: str, kinds: tuple[Any, Any], name: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """A model that `part` of config.json describes, of two classes: its config's and its own. Its tensors begin with
    `name` and a dot. The engine must not run meanwhile.

    While it builds a model, transformers sets the number format of new tensors for the whole process.
    """
    config = tower_config(checkpoint, part, kinds[0])
    with torch.device("meta"), described(checkpoint, part):
        shapes = {key: tuple(tensor.shape) for key, tensor in kinds[1](config).state_dict().items()}
    tensors = take_all(checkpoint, shapes, lambda key: f"{name}.{key}")
    with quiet():
        tower = kinds[1].from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    return tower.to(device).eval()


def load_module(
    checkpoint: Checkpoint,
    part: str,
    make: Callable[[], nn.Module],
    rename: Callable[[str], str],
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """A module that `part` of config.json describes, without tables; `rename` says what a file calls a tensor."""
    with torch.device("meta"), described(checkpoint, part):
        module = make()
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    module.load_state_dict(take_all(checkpoint, shapes, rename), assign=True)
    return module.to(device, dtype).eval()


def take_all(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """The tensors of a module, each checked for its shape."""
    first = rename(next(iter(shapes)))
    prefix = next((prefix for prefix in PREFIXES if checkpoint.has(prefix + first)), PREFIXES[0])
    return {key: checkpoint.take(prefix + rename(key), shape) for key, shape in shapes.items()}


def has_tensors(checkpoint: Checkpoint, *names: str) -> bool:
    """Does the checkpoint hold tensors whose names begin so? A text-only copy may have kept the config of the whole."""
    beginnings = tuple(prefix + name for prefix in PREFIXES for name in names)
    return any(name.startswith(beginnings) for name in checkpoint.names())


def weight_bytes(checkpoint: Checkpoint, beginnings: Sequence[str], dtype: torch.dtype) -> int:
    """Of all tensors whose names begin so, in the number format that they are loaded in."""
    found = tuple(prefix + name for prefix in PREFIXES for name in beginnings)
    shapes = [checkpoint.shape(name) for name in checkpoint.names() if name.startswith(found)]
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar of transformers for a tower."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
