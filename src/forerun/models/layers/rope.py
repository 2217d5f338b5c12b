"""Rotary position embedding: the frequencies of every scaling variant in use, and tables of angles that grow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.interface import Angles
from forerun.models.layers.rows import Pass
from forerun.weights.config_reader import ConfigReader

ORIGINAL = "original_max_position_embeddings"
KINDS = {  # and what each of them has to say beside rope_theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How the columns of a head turn with the position; all but the first in the words of `rope_parameters`."""

    columns: int  # of each head that turn
    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin
    partial_rotary_factor: float = 1.0  # of the pairs of columns: the others have angle 0
    # Pairs of columns that turn with time, height and width, where media count them apart. They are interleaved in that
    # order for as long as height and width have some left; the rest turns with time.
    mrope_section: tuple[int, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """As config.json has them."""
        return {name: getattr(self, name) for name in ("rope_type", "rope_theta", *KINDS[self.rope_type])}


def read_rope(config: ConfigReader, columns: int, *, partial: bool = False) -> RopeConfig:
    """The rope settings of a config.json, old style (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    `partial`: the family may rotate a part of each head, and the caller knows how many columns that are.
    """
    theta = config.number("rope_theta", 10000.0, above=1.0)
    return read_rope_settings(config, rope_part(config), columns, theta, partial)


def rope_part(config: ConfigReader) -> ConfigReader:
    """The rope settings under their new name or the old one; under both where the new one has all that the old has."""
    new, old = config.part("rope_parameters"), config.part("rope_scaling")
    said = {"rope_type" if key == "type" else key: value for key, value in old.values.items()}
    if new.values and any(new.values.get(key) != value for key, value in said.items()):
        raise ForerunError(
            f"{config.name('rope_scaling')} says something else than rope_parameters: remove one of them"
        )
    return new if new.values else old


def read_rope_settings(
    config: ConfigReader, settings: ConfigReader, columns: int, default_theta: float, partial: bool = False
) -> RopeConfig:
    """As `read_rope`, where `settings` may be those of one kind of layer."""
    if columns < 2 or columns % 2:
        raise ForerunError(f"{config.name('head_dim')}: {columns} columns of a head cannot be rotated in pairs")
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind not in KINDS or (partial and kind == "proportional"):
        raise ForerunError(f"{settings.name('rope_type')} {kind[:40]!r} is not supported (only {', '.join(KINDS)})")
    if kind != "proportional" and not partial:
        for place in (config, settings):
            place.only("partial_rotary_factor", 1.0)
    theta = settings.number("rope_theta", default_theta, above=1.0)
    if kind == "default":
        return RopeConfig(columns, theta)
    if kind == "linear":
        return RopeConfig(columns, theta, kind, settings.number("factor"))
    if kind == "proportional":
        part, factor = settings.number("partial_rotary_factor", 1.0, high=1.0), settings.number("factor", 1.0)
        return RopeConfig(columns, theta, kind, factor, partial_rotary_factor=part)
    if kind == "llama3":
        original, factor = config.number(ORIGINAL, settings.number(ORIGINAL)), settings.number("factor")
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if low >= high:
            raise ForerunError(f"{settings.name('low_freq_factor')} must be below high_freq_factor")
        return RopeConfig(columns, theta, kind, factor, original, low, high)
    return _read_yarn(config, settings, columns, theta)


def _read_yarn(config: ConfigReader, settings: ConfigReader, columns: int, theta: float) -> RopeConfig:
    context = settings.number("max_position_embeddings", config.number("max_position_embeddings", 2048.0))
    original = config.number(ORIGINAL, settings.number(ORIGINAL, context))  # beside the settings it has the first word
    factor = settings.number("factor", context / original)

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = amplitude(1.0)
    if "mscale" in settings and "mscale_all_dim" in settings:
        usual = amplitude(settings.number("mscale")) / amplitude(settings.number("mscale_all_dim"))
    return RopeConfig(
        columns,
        theta,
        "yarn",
        factor,
        original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
        attention_factor=settings.number("attention_factor", usual),
    )


def frequencies(rope: RopeConfig) -> Tensor:
    """Inverse frequencies [columns / 2] in float32."""
    base = rope.rope_theta ** (torch.arange(0, rope.columns, 2, dtype=torch.float32) / rope.columns)
    inverse = 1.0 / base
    if rope.rope_type == "linear":
        return inverse / rope.factor
    if rope.rope_type == "proportional":
        inverse[int(rope.partial_rotary_factor * rope.columns // 2) :] = 0
        return inverse / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inverse, rope)
    if rope.rope_type == "yarn":
        return _yarn(base, rope)
    assert rope.rope_type == "default"
    return inverse


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    length = 2 * math.pi / inverse
    blend = (original / length - low) / (high - low)
    smooth = (1 - blend) * inverse / rope.factor + blend * inverse
    out = torch.where(length > original / low, inverse / rope.factor, inverse)
    between = (length <= original / low) & (length >= original / high)
    return torch.where(between, smooth, out)


def _yarn(base: Tensor, rope: RopeConfig) -> Tensor:
    size = rope.columns

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return (1.0 / (rope.factor * base)) * (1 - keep) + (1.0 / base) * keep


def axes(rope: RopeConfig) -> Tensor:
    """Which of time (0), height (1) and width (2) each pair of columns turns with: [columns / 2] int64."""
    axis = torch.zeros(rope.columns // 2, dtype=torch.int64)
    for number, pairs in enumerate(rope.mrope_section[1:], start=1):
        axis[number : 3 * pairs : 3] = number
    return axis


class Rope:
    """cos and sin of every position asked for so far."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.inverse, self.amplitude = frequencies(config).to(device), config.attention_factor
        self.axis = None if not config.mrope_section else axes(config).to(device)
        self.cos = self.sin = torch.empty(0, config.columns // 2, device=device)
        self.fixed = False

    def at(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, size/2] at `positions`, none of them above `highest`."""
        self._fill(highest + 1)
        return self.cos[positions], self.sin[positions]

    def angles(self, batch: Pass) -> Angles:
        """Of all positions: each row of a pass finds its own. For a device `reserve` must have filled the table."""
        positions = None if batch.media is None else batch.media.positions
        self._fill(batch.rows.longest)
        if positions is not None and self.axis is not None:
            return self._of_rows(positions, self.axis)
        return Angles(self.cos, self.sin)

    def placeholder(self) -> Angles:
        """Of no positions."""
        return Angles(self.cos[:0], self.sin[:0])

    def _of_rows(self, positions: Tensor, axis: Tensor) -> Angles:
        """Of the rows of a pass by time, height and width of each [3, rows]: entries of the table, so that a row that
        counts them alike has the bits of any other.
        """
        if not self.fixed:
            self._fill(int(positions.max()) + 1)  # a row of a picture may stand higher than its index
        turned = (
            positions[axis].T.contiguous(),
            torch.arange(len(axis), device=axis.device),
        )  # [rows, columns / 2], [columns / 2]
        return Angles(self.cos[turned], self.sin[turned], by_row=True)

    def reserve(self, positions: int) -> None:
        """Fill the table up to `positions` now: a captured graph cannot make it grow, and wants it where it is."""
        self._fill(positions)
        self.fixed = True

    def _fill(self, positions: int) -> None:
        if positions > len(self.cos):
            assert not self.fixed, "graphs may read the table where it is"
            # Doubling keeps growth rare. An entry does not depend on the table's length where that is a multiple of
            # what a vectorised cosine takes at once.
            room = max(2 * len(self.cos), positions + -positions % 512)
            angles = torch.arange(room, device=self.inverse.device)
            turned = angles.float()[:, None] * self.inverse
            self.cos, self.sin = turned.cos() * self.amplitude, turned.sin() * self.amplitude


class RopeTables:
    """The tables of a model: one for each way its layers turn their heads."""

    def __init__(self, configs: Iterable[RopeConfig], device: torch.device) -> None:
        self._tables = {config: Rope(config, device) for config in configs}

    def __getitem__(self, config: RopeConfig) -> Rope:
        return self._tables[config]

    def angles(self, batch: Pass) -> dict[Rope, Angles]:
        """Of the rows of a pass, by table."""
        return {table: table.angles(batch) for table in self._tables.values()}

    def placeholders(self) -> dict[Rope, Angles]:
        """One for each table, of the right width: what a pass that is written down knows of them."""
        return {table: table.placeholder() for table in self._tables.values()}

    def reserve(self, positions: int) -> None:
        """See `Rope.reserve`."""
        for table in self._tables.values():
            table.reserve(positions)
