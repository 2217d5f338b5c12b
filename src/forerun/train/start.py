"""A trained head to go on from: checked against the target and the settings, and what is known about its training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.train.head import Head
from forerun.train.settings import Settings
from forerun.train.target import Target
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.heads import HeadFolder, find_head

VOCABULARY = "mtp.draft_vocab"
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
        self.checkpoint.finish(lambda name: name == VOCABULARY)
        head.load({name: head.widened(name, tensor, generator) for name, tensor in stored.items()})


def load_start(target: Target, settings: Settings, log: Callable[[str], None]) -> Start | None:
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
    width = _width(folder, target)
    if settings.intermediate is not None and settings.intermediate < width:
        raise ForerunError(
            f"{where}: the head's feed-forward width is {width}, which can grow but not shrink to "
            f"{settings.intermediate}"
        )
    checkpoint = folder.open()
    return Start(folder.taps, width, checkpoint, _draft_vocab(checkpoint, target.config.vocab), _history(folder.path))


def _draft_vocab(checkpoint: Checkpoint, vocab: int) -> Tensor | None:
    if not checkpoint.has(VOCABULARY):
        return None
    ids = checkpoint.integers(VOCABULARY).to(torch.int64)
    rising = ids.ndim == 1 and len(ids) > 0 and bool((ids.diff() > 0).all())
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise ForerunError(f"{checkpoint.path}: {VOCABULARY} must be ascending token ids below {vocab}")
    return ids


def _width(folder: HeadFolder, target: Target) -> int:
    width = folder.layer.get("intermediate_size", target.feed_forward.inner)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ForerunError(f"the MTP head {folder.path}: intermediate_size must be a positive integer")
    return width


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
