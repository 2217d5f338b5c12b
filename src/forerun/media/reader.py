"""The reader of media that all families share: limits, placeholders, and when a tower may run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from forerun.device import out_of_memory
from forerun.errors import ForerunError
from forerun.media.encoded import Encoded, EncodedMedia, Key, key_of
from forerun.media.expansion import Expansion, Prepared, places
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaOutOfMemory, MediaPart, MediaPrompt, PromptTooLong
from forerun.models.layers.media import MediaRun, PromptMedia

Made = TypeVar("Made")
REMEMBERED = 256 << 20  # bytes of host memory for media that were encoded: some two hundred pictures of a large model


class Family(Protocol):
    """What is different in every family of models."""

    @property
    def placeholders(self) -> Mapping[int, Kind]:
        """Tokens that stand for a part in a prompt, of every kind that the family knows."""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds that this model has a tower for."""
        ...

    def prepare(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        """Decode and measure; no tower runs."""
        ...

    def load(self, kind: Kind) -> None:
        """Read the weights of the tower for a kind, unless they are there."""
        ...

    def encode(self, prepared: Prepared) -> Tensor:
        """[rows, hidden] for the decoder."""
        ...

    def whole(self, kind: Kind) -> bool:
        """Do the rows of a stretch see each other?"""
        ...

    def positions(self, tokens: int, stretches: Sequence[tuple[int, tuple[int, int]]]) -> Tensor | None:
        """[3, tokens], where positions have three parts; `stretches`: where each begins, and its grid."""
        ...


class LocalMediaReader:
    """A `MediaReader`: decodes outside of the engine, and runs a tower on a GPU where nobody else is inside of it."""

    def __init__(
        self,
        family: Family,
        owner: AbstractContextManager[None],
        device: torch.device,
        limits: MediaLimits,
        context: int | None = None,
        remembered: int = REMEMBERED,
        weight_bytes: int = 0,
    ) -> None:
        """`context`: tokens that prompt and answer have room for. `remembered`: see `REMEMBERED`."""
        self.weight_bytes = weight_bytes
        self._context, self._encoded = context, EncodedMedia(remembered)
        self._family, self._owner, self._device, self._limits = family, owner, device, limits
        self._decoding = threading.Semaphore(2)  # files that are decoded at once, for the memory they take
        # A GPU must not be given work while a graph is captured. On a CPU a tower may take its time beside the rounds
        # of others.
        self._running: AbstractContextManager[Any] = threading.Lock() if device.type == "cpu" else owner
        self._loaded: set[Kind] = set()

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._family.kinds

    @property
    def placeholders(self) -> Mapping[int, Kind]:
        return self._family.placeholders

    def read(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        """See `MediaReader.read`."""
        at = self._places(ids, parts)
        keys = [key_of(part) for part in parts]
        found = self._expand(keys, parts, len(ids), to_read=True)
        encoded = {}
        for key in dict.fromkeys(keys):
            encoded[key] = self._encode(key, found.pop(key))
        return self._join(ids, at, keys, [encoded[key] for key in keys])

    def count(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int:
        """See `MediaReader.count`."""
        self._places(ids, parts)
        keys = [key_of(part) for part in parts]
        found = self._expand(keys, parts, len(ids), to_read=False)
        for key, each in found.items():
            self._encoded.put(key, Encoded(each.kind, each.tokens, each.stretches, None))
        return len(ids) + sum(len(found[key].tokens) - 1 for key in keys)

    def _places(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> list[int]:
        """Where each part stands; whatever can be said before somebody looks inside is said here."""
        if not parts:
            raise ForerunError("a prompt without media needs no reader of media")
        if len(parts) > self._limits.items:
            raise ForerunError(f"{len(parts)} files came with the prompt, and at most {self._limits.items} are read")
        for part in parts:
            if part.kind not in self.kinds:
                known = " and ".join(sorted(self.kinds))
                raise ForerunError(f"{part.name}: this model does not read {part.kind}, only text and {known}")
        return places(ids, parts, self._family.placeholders)

    def _expand(
        self, keys: Sequence[Key], parts: Sequence[MediaPart], tokens: int, *, to_read: bool
    ) -> dict[Key, Expansion]:
        """`tokens`: of the prompt, with one placeholder for each part. What does not fit never reaches a tower.

        `to_read`: those without rows are `Prepared`.
        """
        found: dict[Key, Expansion] = {}
        left = self._limits.soft_tokens
        for key, part in zip(keys, parts, strict=True):
            if key not in found:
                found[key] = self._known(key, to_read) or self._prepare(part)
            left -= found[key].rows
            if left < 0:
                raise ForerunError(
                    f"{part.name}: the media of the prompt take more than {self._limits.soft_tokens} tokens: bring "
                    "fewer or smaller ones"
                )
            tokens += len(found[key].tokens) - 1
            if to_read and self._context is not None and tokens >= self._context:
                raise PromptTooLong(tokens, self._context)
        return found

    def _known(self, key: Key, to_read: bool) -> Encoded | None:
        known = self._encoded.get(key)
        return None if known is None or (to_read and known.embeddings is None) else known

    def _prepare(self, part: MediaPart) -> Prepared:
        with self._decoding:
            return with_memory(lambda: self._family.prepare(part, self._limits))

    def _encode(self, key: Key, prepared: Expansion) -> Encoded:
        if isinstance(prepared, Encoded):
            return prepared
        assert isinstance(prepared, Prepared)
        rows = with_memory(lambda: self._rows(prepared))
        assert len(rows) == prepared.rows, "a tower gave another number of rows than was announced"
        encoded = Encoded(prepared.kind, prepared.tokens, prepared.stretches, rows)
        self._encoded.put(key, encoded)
        return encoded

    def _rows(self, prepared: Prepared) -> Tensor:
        """Running is under the engine's ownership wherever that is not a CPU."""
        if prepared.kind not in self._loaded:
            self._load(prepared.kind)
        with self._running, torch.inference_mode():
            # In host memory, where they may be needed again; a copy waits for the device, and holds nothing else.
            return self._family.encode(prepared).to("cpu", copy=True)

    def _load(self, kind: Kind) -> None:
        """While it builds a tower, transformers changes the number format of new tensors for the whole process: neither
        the engine nor another tower may run. Who waits for a tower on a CPU is not inside of the engine.
        """
        with self._running, nullcontext() if self._running is self._owner else self._owner:
            self._family.load(kind)
        self._loaded.add(kind)

    def _join(
        self, ids: Sequence[int], at: Sequence[int], keys: Sequence[Key], encoded: Sequence[Encoded]
    ) -> MediaPrompt:
        expanded: list[int] = []
        runs, grids, past = [], [], 0
        for place, key, each in zip(at, keys, encoded, strict=True):
            expanded += ids[past:place]
            used, rows = 0, each.embeddings
            assert rows is not None
            for stretch in each.stretches:
                start = len(expanded) + stretch.start
                own = rows[used : used + stretch.rows]
                content = b"%s %d " % (each.kind.encode(), used) + key[1]
                runs.append(MediaRun(start, own, self._family.whole(each.kind), content))
                grids.append((start, stretch.grid))
                used += stretch.rows
            expanded += each.tokens
            past = place + 1
        expanded += ids[past:]
        return MediaPrompt(expanded, PromptMedia(runs, self._family.positions(len(expanded), grids)))


def with_memory(make: Callable[[], Made]) -> Made:
    """What it makes, or `MediaOutOfMemory`."""
    try:
        return make()
    except Exception as error:
        if not out_of_memory(error):
            raise
    # Not inside the handler: an error keeps its cause, that all its frames, and those what a tower had made so far.
    raise MediaOutOfMemory
