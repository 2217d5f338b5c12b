"""The GPU body of `choose`: processors edit a copy of the logits, Triton filters and draws.

What Triton leaves open, a wide nucleus or a large top-k, `reference` decides. Needs triton; `choose` imports it on
first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.gpu.choosing import BROKEN, UNDECIDED, choose_tokens
from forerun.kernels.gpu.filtering import find_limits
from forerun.kernels.interface import LARGEST_TOP_K
from forerun.sample import reference
from forerun.sample.noise import split_seed
from forerun.sample.processors import is_plain, process_torch
from forerun.sample.row import Row, RowError, check_best


class Numbers(NamedTuple):
    """What rows ask for, on the device."""

    temperature: Tensor  # [R] float64, as top_p and offset
    top_p: Tensor
    offset: Tensor
    position: Tensor  # [R] int64, as top_k
    top_k: Tensor
    seed: Tensor  # [R, 3] int64


def numbers(rows: Sequence[Row], device: torch.device) -> Numbers:
    """In one copy: each costs as much as a kernel, whatever it holds."""
    count = len(rows)
    room = count + count % 2  # parts start at multiples of 16 bytes: Triton compiles other code for other addresses
    packed = np.zeros(8 * room, dtype=np.int64)
    parts = packed.reshape(8, room)
    for index, row in enumerate(rows):
        params = row.params
        floats = np.array([params.temperature, params.top_p, reference.min_p_offset(params)])
        parts[:3, index] = floats.view(np.int64)
        parts[3, index] = row.position
        parts[4, index] = params.top_k if params.filtered else 0
        packed[5 * room + 3 * index : 5 * room + 3 * index + 3] = [*split_seed(params.seed), params.choice]
    there = torch.from_numpy(packed).to(device)
    lines = there.view(8, room)[:, :count]
    temperature, top_p, offset = (line.view(torch.float64) for line in lines[:3])
    seed = there[5 * room : 5 * room + 3 * count].view(count, 3)
    return Numbers(temperature, top_p, offset, lines[3], lines[4], seed)


def decides(row: Row) -> bool:
    """Whether the device may try."""
    return row.params.greedy or row.params.top_k <= LARGEST_TOP_K


def choose(logits: Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row."""
    places = [index for index, row in enumerate(rows) if decides(row)]
    rest = [index for index, row in enumerate(rows) if not decides(row)]
    chosen: dict[int, int] = {}
    if places:
        some = logits if not rest else logits[places]
        tokens, left_open = _draw(some, [rows[index] for index in places], vocab, places)
        chosen, rest = dict(zip(places, tokens, strict=True)), rest + left_open
    if rest:
        chosen.update(zip(rest, _choose_rest(logits[rest], [rows[i] for i in rest], vocab, rest), strict=True))
    return [chosen[index] for index in range(len(rows))]


def _draw(logits: Tensor, rows: Sequence[Row], vocab: int, places: list[int]) -> tuple[list[int], list[int]]:
    """Tokens, and places that are left open; `places` are the rows' indices in the call."""
    lines = logits.detach() if logits.stride(1) == 1 else logits.detach().contiguous()
    before = after = lines[:, :vocab]
    if not all(map(is_plain, rows)):
        after = before.float() + 0.0  # a copy, as the reference makes it
        for line, row in zip(after, rows, strict=True):
            process_torch(line, row)
    asked = numbers(rows, logits.device)
    limits = None
    if any(row.params.filtered for row in rows):
        top_k = asked.top_k.to(torch.int32)
        limits = find_limits(after, vocab, asked.temperature, top_k, asked.top_p, asked.offset)
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    bad = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    choose_tokens(after, vocab, asked.temperature, asked.seed, asked.position, out, bad, limits=limits)
    if after is not before:  # a mask must not hide what is broken
        bad = torch.where(before.amax(dim=-1) < float("inf"), bad, BROKEN)
    tokens, flags = torch.stack([out, bad.long()]).tolist()  # one copy to the host
    for index, flag in enumerate(flags):
        if flag == BROKEN:
            for line in (before[index], after[index]):
                check_best(float(line.float().amax()), places[index])
    return tokens, [place for flag, place in zip(flags, places, strict=True) if flag == UNDECIDED]


def _choose_rest(logits: Tensor, rows: Sequence[Row], vocab: int, places: list[int]) -> list[int]:
    """The other rows; an error names the row by its index in the call."""
    try:
        return reference.choose(logits, rows, vocab)
    except RowError as error:
        raise RowError(str(error), places[error.row]) from None


def probabilities(logits: Tensor, rows: Sequence[Row], vocab: int) -> Tensor:
    """The distribution `choose` draws from, as the reference has it."""
    return reference.probabilities(logits, rows, vocab)
