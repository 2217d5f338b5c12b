"""The GPU body of `choose`: one Triton call for the rows whose logits are used as they are, `reference` for the others.

Needs triton; `choose` imports it on first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kernels.gpu.choosing import choose_tokens
from forerun.sample import reference
from forerun.sample.noise import split_seed
from forerun.sample.processors import is_plain
from forerun.sample.row import Row, RowError, check_best


def simple(row: Row) -> bool:
    """Whether the row's token is the argmax of its logits, or of its logits and noise."""
    return is_plain(row) and (row.params.greedy or not row.params.filtered)


def choose(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row."""
    places = [index for index, row in enumerate(rows) if simple(row)]
    if len(places) == len(rows):
        return _choose_simple(logits, rows, vocab, places)
    rest = [index for index, row in enumerate(rows) if not simple(row)]
    chosen = dict(zip(rest, _choose_rest(logits[rest], [rows[i] for i in rest], vocab, rest), strict=True))
    if places:
        tokens = _choose_simple(logits[places], [rows[i] for i in places], vocab, places)
        chosen.update(zip(places, tokens, strict=True))
    return [chosen[index] for index in range(len(rows))]


def _choose_simple(logits: torch.Tensor, rows: Sequence[Row], vocab: int, places: list[int]) -> list[int]:
    """Rows without processors and filters; `places` are their indices in the call."""

    def here(values: list[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    lines = logits.detach() if logits.stride(1) == 1 else logits.detach().contiguous()
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    bad = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    choose_tokens(
        lines,
        vocab,
        here([row.params.temperature for row in rows], torch.float64),
        here([[*split_seed(row.params.seed), row.params.choice] for row in rows], torch.int64),
        here([row.position for row in rows], torch.int64),
        out,
        bad,
    )
    tokens, broken = torch.stack([out, bad.long()]).tolist()  # one copy to the host
    for line, flag, place in zip(lines, broken, places, strict=True):
        if flag:
            check_best(float(line[:vocab].float().amax()), place)
    chosen: list[int] = tokens
    return chosen


def _choose_rest(logits: torch.Tensor, rows: Sequence[Row], vocab: int, places: list[int]) -> list[int]:
    """The other rows; an error names the row by its index in the call."""
    try:
        return reference.choose(logits, rows, vocab)
    except RowError as error:
        raise RowError(str(error), places[error.row]) from None


def probabilities(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """The distribution `choose` draws from, as the reference has it."""
    return reference.probabilities(logits, rows, vocab)
