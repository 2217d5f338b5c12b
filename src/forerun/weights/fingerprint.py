"""A hash that tells one model's weights from another's without reading all of them."""

from __future__ import annotations

import hashlib
import string
from pathlib import Path

from forerun.weights.checkpoint import Checkpoint

# A converted folder says in its config.json what it was made from, so that what belongs to the source still fits.
SOURCE_HASH = "forerun_source_hash"
EDGE = 4096  # bytes of each tensor that are hashed, at its beginning and at its end


def contents_digest(path: Path) -> str:
    """SHA-256, in hex, over all of a GGUF file, or over all weights of a folder and what says how they and media are
    read.

    It reads everything: for what must never be used with other weights, however little they differ.
    """
    patterns = ("config.json", "*processor_config.json", "*.safetensors")
    files = [path] if path.is_file() else [file for pattern in patterns for file in sorted(path.glob(pattern))]
    total = hashlib.sha256()
    for file in files:
        if file.is_file():
            with file.open("rb") as stream:
                total.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256, in hex, over names, number formats, shapes, and the first and last bytes of every tensor."""
    recorded = checkpoint.config.get(SOURCE_HASH)
    if isinstance(recorded, str) and len(recorded) == 64 and set(recorded) <= set(string.hexdigits):
        return recorded.lower()
    total = hashlib.sha256()
    for name in sorted(checkpoint.names()):
        first, last = checkpoint.edges(name, EDGE)
        shape = ",".join(map(str, checkpoint.shape(name)))
        for part in (name.encode(), checkpoint.number_format(name).encode(), shape.encode(), first, last):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()
