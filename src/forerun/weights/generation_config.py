"""generation_config.json, read with care: what a model's makers recommend for sampling, and tokens never to choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.weights.config_reader import ConfigReader
from forerun.weights.described import described
from forerun.weights.gguf_metadata import decimal

NAME = "generation_config.json"
# Names as users of forerun know them, and what counts as sane.
RANGES = {
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
# llama.cpp's names for what forerun knows, behind `general.sampling.`.
GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
COLDEST = 1e-6  # files that mean "no sampling" may say something smaller than that


def generation_defaults(model: Path) -> dict[str, float]:
    """Option → value. What is no number, out of range or unknown to us is left out; no sampling is temperature 0."""
    config = described(model, NAME) or {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0} | _numbers(config, "repetition_penalty")
    return _numbers(config, *RANGES)


def sampling_defaults(metadata: Mapping[str, object]) -> dict[str, float]:
    """What the header of a GGUF file recommends for sampling, in the words of generation_config.json."""
    found = _numbers({name: metadata.get(f"general.sampling.{key}") for name, key in GGUF_KEYS.items()}, *GGUF_KEYS)
    if metadata.get("general.sampling.penalty_last_n") == 0:  # of so many tokens repetitions count
        found.pop("repetition_penalty", None)
    return {name: decimal(value) if isinstance(value, float) else value for name, value in found.items()}


def _numbers(config: Mapping[str, object], *names: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        value, (low, high) = config.get(name), RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if low <= value <= high and (name != "top_k" or value == int(value)):
            found[name] = int(value) if name == "top_k" else float(value)
    if found.get("temperature", 1.0) < COLDEST:
        found["temperature"] = 0.0
    return found


def suppressed_tokens(model: Path) -> frozenset[int]:
    """Ids of `suppress_tokens`; empty where nothing is said. transformers leaves them out of every answer too."""
    settings = ConfigReader(described(model, NAME) or {}, str(model / NAME))
    return frozenset(token for token in settings.integers("suppress_tokens", (), low=-1) if token >= 0)
