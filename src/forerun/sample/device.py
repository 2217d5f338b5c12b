"""The GPU body of `choose`: Triton for the rows whose logits are used as they are, `reference` for the others.

Needs triton; `choose` imports it on first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kernels.gpu.choosing import BROKEN, UNDECIDED, choose_tokens
from forerun.kernels.gpu.filtering import find_limits
from forerun.kernels.interface import LARGEST_TOP_K
from forerun.sample import reference
from forerun.sample.noise import split_seed
from forerun.sample.processors import is_plain
from forerun.sample.row import Row, RowError, check_best


def simple(row: Row) -> bool:
    """Whether the row's token is the argmax of its logits, or of its logits and noise, among those that survive."""
    return is_plain(row) and (row.params.greedy or row.params.top_k <= LARGEST_TOP_K)


def choose(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row."""
    places = [index for index, row in enumerate(rows) if simple(row)]
    if len(places) == len(rows):
        tokens, rest = _choose_simple(logits, rows, vocab, places)
        chosen = dict(zip(places, tokens, strict=True))
    else:
        chosen, rest = {}, [index for index, row in enumerate(rows) if not simple(row)]
        if places:
            tokens, open_rows = _choose_simple(logits[places], [rows[i] for i in places], vocab, places)
            chosen, rest = dict(zip(places, tokens, strict=True)), rest + open_rows
    if rest:
        chosen.update(zip(rest, _choose_rest(logits[rest], [rows[i] for i in rest], vocab, rest), strict=True))
    return [chosen[index] for index in range(len(rows))]


def _choose_simple(
    logits: torch.Tensor, rows: Sequence[Row], vocab: int, places: list[int]
) -> tuple[list[int], list[int]]:
    """Rows without processors; `places` are their indices in the call. Returns tokens, and places left open."""

    def here(values: list[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    params = [row.params for row in rows]
    lines = logits.detach() if logits.stride(1) == 1 else logits.detach().contiguous()
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    bad = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    temperature, limits = here([p.temperature for p in params], torch.float64), None
    if any(p.filtered for p in params):
        limits = find_limits(
            lines,
            vocab,
            temperature,
            here([p.top_k if p.filtered else 0 for p in params], torch.int32),
            here([p.top_p for p in params], torch.float64),
            here([reference.min_p_offset(p) for p in params], torch.float64),
        )
    choose_tokens(
        lines,
        vocab,
        temperature,
        here([[*split_seed(p.seed), p.choice] for p in params], torch.int64),
        here([row.position for row in rows], torch.int64),
        out,
        bad,
        limits=limits,
    )
    tokens, flags = torch.stack([out, bad.long()]).tolist()  # one copy to the host
    for line, flag, place in zip(lines, flags, places, strict=True):
        if flag == BROKEN:
            check_best(float(line[:vocab].float().amax()), place)
    return tokens, [place for flag, place in zip(flags, places, strict=True) if flag == UNDECIDED]


def _choose_rest(logits: torch.Tensor, rows: Sequence[Row], vocab: int, places: list[int]) -> list[int]:
    """The other rows; an error names the row by its index in the call."""
    try:
        return reference.choose(logits, rows, vocab)
    except RowError as error:
        raise RowError(str(error), places[error.row]) from None


def probabilities(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """The distribution `choose` draws from, as the reference has it."""
    return reference.probabilities(logits, rows, vocab)
