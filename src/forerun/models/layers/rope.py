"""Rotary position embedding: the frequencies of every scaling variant in use, and a table of angles that grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.interface import Angles
from forerun.models.layers.rows import Pass


def rope_parameters(config: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """The rope settings of a config.json, old style (`rope_theta`, `rope_scaling`) or new (`rope_parameters`)."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings.setdefault("rope_type", settings.pop("type", "default"))
    settings.setdefault("rope_theta", config.get("rope_theta", default_theta))
    settings.setdefault("max_position_embeddings", config.get("max_position_embeddings", 2048))
    return settings


def frequencies(settings: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Inverse frequencies [size/2] in float32, and the factor that multiplies cos and sin."""
    kind = settings["rope_type"]
    base = settings["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    inverse = 1.0 / base
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / settings["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, settings), 1.0
    if kind == "yarn":
        return _yarn(base, settings, size)
    raise ForerunError(f"rope scaling {kind!r} is not supported (use a model with default, linear, llama3 or yarn)")


def _llama3(inverse: Tensor, settings: Mapping[str, Any]) -> Tensor:
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    length = 2 * math.pi / inverse
    blend = (original / length - low) / (high - low)
    smooth = (1 - blend) * inverse / factor + blend * inverse
    out = torch.where(length > original / low, inverse / factor, inverse)
    between = (length <= original / low) & (length >= original / high)
    return torch.where(between, smooth, out)


def _yarn(base: Tensor, settings: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    original = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    factor = settings.get("factor") or settings["max_position_embeddings"] / original
    theta = settings["rope_theta"]

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    inverse = (1.0 / (factor * base)) * (1 - keep) + (1.0 / base) * keep
    return inverse, _yarn_amplitude(settings, factor)


def _yarn_amplitude(settings: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(settings["mscale"]) / scale(settings["mscale_all_dim"])
    return scale(1.0)


class Rope:
    """cos and sin of every position asked for so far."""

    def __init__(self, settings: Mapping[str, Any], size: int, device: torch.device) -> None:
        inverse, self.amplitude = frequencies(settings, size)
        self.inverse = inverse.to(device)
        self.cos = self.sin = torch.empty(0, size // 2, device=device)
        self.fixed = False

    def at(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, size/2] at `positions`, none of them above `highest`."""
        self._fill(highest + 1)
        return self.cos[positions], self.sin[positions]

    def angles(self, batch: Pass) -> Angles:
        """Of all positions: each row of a pass finds its own. For a device `reserve` must have filled the table."""
        self._fill(batch.rows.longest)
        return Angles(self.cos, self.sin)

    def reserve(self, positions: int) -> None:
        """Fill the table up to `positions` now: a captured graph cannot make it grow, and wants it where it is."""
        self._fill(positions)
        self.fixed = True

    def _fill(self, positions: int) -> None:
        if positions > len(self.cos):
            assert not self.fixed, "graphs may read the table where it is"
            # Doubling keeps growth rare; an entry does not depend on the table's length.
            angles = torch.arange(max(2 * len(self.cos), positions, 512), device=self.inverse.device)
            turned = angles.float()[:, None] * self.inverse
            self.cos, self.sin = turned.cos() * self.amplitude, turned.sin() * self.amplitude
