"""Media that were encoded before: a chat brings the same pictures with every turn."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from forerun.media.expansion import Expansion
from forerun.media.parts import Kind, MediaPart

# What a file is taken for, and the hash of its bytes. Settings and limits are the reader's, who keeps one such store.
Key = tuple[Kind, bytes]


def key_of(part: MediaPart) -> Key:
    """The same for the same file, whatever its name."""
    return part.kind, hashlib.sha256(part.data).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Encoded(Expansion):
    """A part as the decoder reads it."""

    embeddings: Tensor | None  # [rows, hidden] in host memory; None: its tokens were counted, and no tower has run

    @property
    def bytes(self) -> int:
        """Host memory it takes, about."""
        rows = 0 if self.embeddings is None else self.embeddings.nbytes
        return rows + 8 * len(self.tokens) + 200 * len(self.stretches) + 500


class EncodedMedia:
    """As many as fit into so many bytes; the least recently used go first. Safe in any thread."""

    def __init__(self, most: int) -> None:
        self.bytes, self._most = 0, most
        self._kept: OrderedDict[Key, Encoded] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Encoded | None:
        """None: it never came, or long ago."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Key, encoded: Encoded) -> None:
        """Keep it, unless it alone is too large, or it is there already with its rows."""
        with self._lock:
            before = self._kept.get(key)
            if encoded.bytes > self._most or (before is not None and encoded.embeddings is None):
                return
            self.bytes += encoded.bytes - (0 if before is None else before.bytes)
            self._kept[key] = encoded
            self._kept.move_to_end(key)
            while self.bytes > self._most:
                _, oldest = self._kept.popitem(last=False)
                self.bytes -= oldest.bytes
