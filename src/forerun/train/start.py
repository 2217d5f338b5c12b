"""A trained head to go on from: checked against the target and the settings, and what is known about its training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.draft.head import DRAFT_VOCABULARY, draft_vocabulary
from forerun.errors import ForerunError
from forerun.train.head import Head
from forerun.train.settings import Settings
from forerun.train.target import FrozenTarget
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.heads import find_head

TOLD = ("optimiser", "steps", "positions", "seconds", "rate")


@dataclass(frozen=True, slots=True)
class Start:
    """A head to begin from; its tensors are read when a head takes them."""

    taps: tuple[int, ...]
    intermediate: int
    checkpoint: Checkpoint
    draft_vocab: Tensor | None  # ids it may draft, ascending; None: all
    history: list[dict[str, Any]]  # data and training of the runs before this one, the first one first

    def put_into(self, head: Head, seed: int) -> None:
        """Give a head these weights, or say which of them does not fit. A wider one drafts the same at first."""
        shapes, generator = head.shapes(self.intermediate), torch.Generator().manual_seed(seed)
        stored = {name: self.checkpoint.floats(name, shape) for name, shape in shapes.items()}
        self.checkpoint.finish(lambda name: name == DRAFT_VOCABULARY)
        head.load({name: head.widened(name, tensor, generator) for name, tensor in stored.items()})


def load_start(target: FrozenTarget, settings: Settings, log: Callable[[str], None]) -> Start | None:
    """The head that the settings name, if they do."""
    if settings.start_from is None:
        return None
    found = find_head(target.checkpoint, Path(settings.start_from))
    assert found is not None, "a folder was given"
    if found.warning is not None:
        log(found.warning)
    folder = found.folder
    where = f"--start-from {settings.start_from}"
    if settings.taps is not None and settings.taps != folder.taps:
        raise ForerunError(f"{where}: the head taps layers {_list(folder.taps)}, not {_list(settings.taps)}")
    layer = ConfigReader(folder.layer, f"the MTP head {folder.path}", "layer.")
    width = layer.integer("intermediate_size", target.feed_forward.inner)
    if settings.intermediate is not None and settings.intermediate < width:
        raise ForerunError(
            f"{where}: the head's feed-forward width is {width}, which can grow but not shrink to "
            f"{settings.intermediate}"
        )
    checkpoint, vocab = folder.open(), target.config.vocab
    return Start(folder.taps, width, checkpoint, draft_vocabulary(checkpoint, vocab, vocab), _history(folder.path))


def _history(folder: Path) -> list[dict[str, Any]]:
    """What the head's own report says; nothing when there is none, since only the model card needs it."""
    try:
        report = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        known = {"optimiser": "AdamW"} | report["training"]  # reports of earlier versions do not name it
        training = {name: known[name] for name in TOLD}
        return [*report.get("history", []), {"data": report["data"], "training": training, "device": report["device"]}]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _list(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps)) or "none"
