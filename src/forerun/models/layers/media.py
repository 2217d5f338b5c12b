"""Media inside a prompt: what the first layer reads in place of placeholder tokens, and where those rows stand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MediaRun:
    """Consecutive placeholders of a prompt that one picture, frame or stretch of sound takes the place of."""

    start: int  # of the first placeholder, in tokens of the prompt
    embeddings: Tensor  # [placeholders, hidden]: what the first layer reads; in host memory, whatever runs the model
    whole: bool = False  # its rows see each other in layers with a window, later ones too: one pass must hold them all
    # A digest of the file and of which part of it this is; empty: it is made from the embeddings.
    content: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + len(self.embeddings)

    @property
    def digest(self) -> bytes:
        """Two runs with the same one have the same embeddings."""
        if self.content:
            return self.content
        rows = self.embeddings.contiguous().view(torch.uint8).numpy()
        return hashlib.blake2b(rows.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """All media of one prompt, in order."""

    runs: Sequence[MediaRun]
    # [3, tokens of the prompt] int64: time, height and width of every token, in models that count them apart. The last
    # token stands at its index, so that whatever comes after the prompt does as well: attention sees differences alone.
    positions: Tensor | None = None

    def border(self, stop: int) -> int:
        """Where a pass that would end before token `stop` may end: not inside rows that see each other."""
        return next((run.stop for run in self.runs if run.whole and run.start < stop < run.stop), stop)

    def page_names(self, page: int) -> list[bytes]:
        """For each page of tokens up to the end of the prompt a digest of what it holds beside them: media, and
        positions that are not the index. Empty for plain text at its place.
        """
        length = self.stop if self.positions is None else self.positions.shape[1]
        found = []
        for start in range(0, length, page):
            parts = [
                b"%d %d " % (run.start - start, len(run.embeddings)) + run.digest
                for run in self.runs
                if run.start < start + page and start < run.stop
            ]
            if self.positions is not None:
                places = self._positions(start, start + page)
                if bool((places != torch.arange(start, start + page)).any()):
                    parts.append(places.numpy().tobytes())
            found.append(hashlib.blake2b(b"".join(parts), digest_size=16).digest() if parts else b"")
        return found

    @property
    def stop(self) -> int:
        """Behind the last of them. From there on all tokens stand at their index: nobody needs to know of media."""
        return max((run.stop for run in self.runs), default=0)

    def between(self, start: int, stop: int, device: torch.device) -> MediaRows:
        """The part that tokens `start` to `stop` of the sequence read, on the device that reads it."""
        index, parts, together = [], [], torch.full((stop - start,), -1)
        for number, run in enumerate(self.runs):
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                assert not run.whole or (first, last) == (run.start, run.stop), "rows that see each other were cut"
                index.append(torch.arange(first - start, last - start))
                parts.append(run.embeddings[first - run.start : last - run.start])
                if run.whole:
                    together[first - start : last - start] = number
        return MediaRows(
            torch.cat(index).to(device) if index else None,
            torch.cat(parts).to(device) if parts else None,
            together.to(device) if bool((together >= 0).any()) else None,
            None if self.positions is None else self._positions(start, stop).to(device),
        )

    def _positions(self, start: int, stop: int) -> Tensor:
        """[3, tokens]."""
        assert self.positions is not None
        known = self.positions[:, start:stop]
        after = torch.arange(start + known.shape[1], stop, device=known.device)  # the prompt: at their index
        return torch.cat([known, after.expand(3, -1)], dim=1)


@dataclass(slots=True)
class MediaRows:
    """What media mean for the rows of one pass."""

    index: Tensor | None  # [n] int64: rows that media take the place of
    embeddings: Tensor | None  # [n, hidden]
    together: Tensor | None  # [rows] int64: rows of one number, if not -1, see each other in layers with a window
    positions: Tensor | None  # [3, rows] int64: time, height and width

    def merge(self, x: Tensor) -> Tensor:
        """Embeddings [rows, hidden] of a pass, media in their places."""
        if self.index is None or self.embeddings is None:
            return x
        return x.index_copy(0, self.index, self.embeddings.to(x.dtype))

    def text(self, tokens: Tensor, padding: int) -> Tensor:
        """Tokens [rows] of a pass; in the place of media, padding."""
        return tokens if self.index is None else tokens.index_fill(0, self.index, padding)


def media_of_pass(parts: Sequence[tuple[PromptMedia | None, int, int]], device: torch.device) -> MediaRows | None:
    """What media mean for the rows of all sequences of a pass: of each its media, first token and the one behind."""
    if all(media is None for media, _, _ in parts):
        return None
    counted = any(media is not None and media.positions is not None for media, _, _ in parts)
    index, embeddings, together, positions = [], [], [], []
    first = runs = 0
    for media, start, stop in parts:
        found = PromptMedia(()).between(start, stop, device) if media is None else media.between(start, stop, device)
        if found.index is not None and found.embeddings is not None:
            index.append(found.index + first)
            embeddings.append(found.embeddings)
        alone = torch.full((stop - start,), -1, device=device)
        numbers = alone if found.together is None else found.together
        together.append(torch.where(numbers < 0, -1, numbers + runs))
        if counted:
            usual = torch.arange(start, stop, device=device).expand(3, -1)
            positions.append(usual if found.positions is None else found.positions)
        first, runs = first + stop - start, runs + (0 if media is None else len(media.runs))
    beside = torch.cat(together)
    return MediaRows(
        torch.cat(index) if index else None,
        torch.cat(embeddings) if embeddings else None,
        beside if bool((beside >= 0).any()) else None,
        torch.cat(positions, dim=1) if counted else None,
    )
