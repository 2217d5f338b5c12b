"""Tokens that a checkpoint says must never be generated: `suppress_tokens` of generation_config.json."""

from __future__ import annotations

from pathlib import Path

from forerun.weights.config_reader import ConfigReader
from forerun.weights.folder import read_json


def suppressed_tokens(path: Path) -> frozenset[int]:
    """Their ids; empty where nothing is said. transformers leaves them out of every answer too."""
    name = "generation_config.json"
    settings = ConfigReader(read_json(path, name) or {}, str(path / name))
    return frozenset(token for token in settings.integers("suppress_tokens", (), low=-1) if token >= 0)
