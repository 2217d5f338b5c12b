"""Tokens that a checkpoint says must never be generated: `suppress_tokens` of generation_config.json."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ForerunError
from forerun.weights.folder import read_json


def suppressed_tokens(path: Path) -> frozenset[int]:
    """Their ids; empty where nothing is said. transformers leaves them out of every answer too."""
    wanted = (read_json(path, "generation_config.json") or {}).get("suppress_tokens")
    if wanted is None:
        return frozenset()
    good = isinstance(wanted, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in wanted)
    if not good:
        raise ForerunError(f"{path}: suppress_tokens of generation_config.json must be a list of token ids")
    return frozenset(token for token in wanted if token >= 0)
