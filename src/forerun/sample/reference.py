"""The vectorised torch body of `choose`: plain, for any device, and the oracle of the compiled one.

All filters keep a prefix of the tokens sorted by (−logit, id). Sums over the vocabulary are sums of integers
(`portable.weights`), exact in any order: the bits of a row do not depend on the rows beside it.
"""

import math
from collections.abc import Sequence

import torch

from forerun.kernels import portable
from forerun.sample import noise
from forerun.sample.parameters import SamplingParams
from forerun.sample.processors import process_torch
from forerun.sample.row import Row, check_best


def min_p_offset(params: SamplingParams) -> float:
    """min-p as a distance below the best logit: p ≥ min_p · p_max means l ≥ l_max + T · log min_p."""
    return params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf


def processed(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """Logits after bias, masks and penalties, float32 [R, vocab]; a new tensor."""
    work = logits[:, :vocab].detach().float() + 0.0  # a copy in which −0 has become 0: sorts may tell them apart
    _check(work)
    for line, row in zip(work, rows, strict=True):
        process_torch(line, row)
    _check(work)
    return work


def _check(work: torch.Tensor) -> None:
    for index, best in enumerate(work.amax(dim=-1).tolist()):
        check_best(best, index)


def choose(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row."""
    work = processed(logits, rows, vocab)
    sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
    chosen: list[int] = work.argmax(dim=-1).tolist()  # the first of equals
    if sampled:
        drawn = _sample(work[sampled], [rows[i] for i in sampled])
        for i, token in zip(sampled, drawn, strict=True):
            chosen[i] = token
    return chosen


def _sample(work: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """argmax(l + T·g) over the survivors, for rows above temperature 0. Float64."""
    params = [row.params for row in rows]
    g = noise.gumbel_rows(
        [p.seed for p in params],
        [p.choice for p in params],
        [row.position for row in rows],
        work.shape[1],
        work.device,
    )
    scores = work.double() + _column([p.temperature for p in params], work) * g
    scores.masked_fill_(~survivors(work, params), -math.inf)
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    return tokens


def survivors(work: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which tokens pass top-k, top-p and min-p, bool [R, V]; temperatures are above 0."""
    possible = work > -math.inf
    if not any(p.filtered for p in params):
        return possible
    values, order = work.sort(dim=-1, descending=True, stable=True)  # stable: the lower id first among equals
    best = values[:, :1].double()
    rank = torch.arange(work.shape[1], device=work.device)
    keep = rank < _column([float(p.top_k or work.shape[1]) for p in params], work)
    mass = portable.weights((values.double() - best) * _column([1.0 / p.temperature for p in params], work), torch)
    mass = mass * keep
    total = mass.sum(dim=-1, keepdim=True)
    target = torch.ceil(total.double() * _column([p.top_p for p in params], work)).long().clamp(min=1)
    reached = mass.cumsum(dim=-1) - mass >= target  # by the tokens before this one
    limited = torch.tensor([[p.top_p < 1] for p in params], device=work.device)
    keep &= ~(reached & limited)
    keep &= values.double() >= best + _column([min_p_offset(p) for p in params], work)
    return torch.zeros_like(keep).scatter(1, order, keep) & possible


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """One number per row, float64 [R, 1]."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def probabilities(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """The distribution `choose` draws from, float64, zero beyond the vocabulary: same shape as `logits`."""
    work = processed(logits, rows, vocab)
    result = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for line, row, out in zip(work, rows, result, strict=True):  # one row at a time: a sum may depend on its neighbours
        if row.params.greedy:
            out[line.argmax()] = 1.0
            continue
        x = (line.double() - line.max().double()) * (1.0 / row.params.temperature)
        mass = portable.scaled_exp(x, torch) * survivors(line[None], [row.params])[0]
        out[:vocab] = mass / mass.sum()
    return result
