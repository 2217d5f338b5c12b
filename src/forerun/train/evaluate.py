"""How many drafts of a head are accepted, on answers to prompts it was not trained on.

Drafts are compared with what the target says, from every position of its answers. A draft counts only when all drafts
before it were right, and then the chain has read the target's own tokens: one teacher-forced pass gives exactly what
drafting would. Above temperature 0 head and target choose with the same Gumbel noise, as `coupled` acceptance does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.train.generate import padded, write
from forerun.train.head import Head

DEPTH = 6
REPORTED_DEPTHS = (4, 6)
TOLERATED = 0.02  # share of the tokens per round that a reduced vocabulary may cost
VOCABULARIES = (8192, 16_384, 24_576, 32_768)
PROMPTS_AT_ONCE = 128


@dataclass(slots=True)
class Measured:
    """One answer: per vocabulary, how many drafts from each of its positions are right."""

    category: str
    looped: bool
    accepted: dict[int, list[int]]  # vocabulary size -> accepted drafts by base
    tokens: int


@torch.inference_mode()
def evaluate(
    head: Head,
    prompts: Sequence[tuple[str, list[int]]],
    ends: frozenset[int],
    order: Tensor,
    vocabularies: Sequence[int],
    *,
    temperature: float,
    tokens: int,
    seed: int,
) -> list[Measured]:
    """Answers to (category, ids) measured; `order` has all ids, the most frequent first."""
    target = head.target
    generator = torch.Generator(device=target.device)

    def noise(index: int, rows: int) -> Tensor:
        generator.manual_seed(seed * 100_003 + index)
        drawn = torch.empty(rows, target.config.vocab, device=target.device)
        return -drawn.exponential_(generator=generator).log_()

    ids = [prompt for _, prompt in prompts]
    answers = write(target, ids, [temperature] * len(ids), ends, tokens=tokens, noise=noise, keep_loops=True)
    first = min(map(len, ids)) - 1
    outputs = _drafts(head, [prompt + said for prompt, (said, _) in zip(ids, answers, strict=True)], first)
    matrix = target.output_wide[order]  # frequent ids first: a vocabulary is a beginning of the columns
    before = torch.tensor([len(prompt) for prompt in ids], device=target.device)
    said_tokens = padded([said for said, _ in answers], -1).to(target.device)
    right = torch.zeros(len(vocabularies), DEPTH, len(ids), tokens, dtype=torch.bool, device=target.device)
    each = torch.arange(len(ids), device=target.device)
    for index in range(1, said_tokens.shape[1]):
        truth = said_tokens[:, index]
        shared = temperature * noise(index, len(ids))[:, order] if temperature > 0 else None
        for step in range(min(DEPTH, index)):
            place = (before + index - 2 - step - first).clamp_max(outputs[step].shape[1] - 1)
            logits = outputs[step][each, place].float() @ matrix.T
            if shared is not None:
                logits = logits + shared
            for place_in, size in enumerate(vocabularies):
                chosen = order[logits[:, :size].argmax(dim=-1)]
                right[place_in, step, :, index - 1 - step] = chosen == truth
    accepted = right.int().cumprod(dim=1).sum(dim=1).cpu()  # [vocabularies, rows, bases]
    return [
        Measured(
            category=prompts[row][0],
            looped=looped,
            accepted={
                size: accepted[at, row, : max(len(said) - 1, 0)].tolist() for at, size in enumerate(vocabularies)
            },
            tokens=len(said),
        )
        for row, (said, looped) in enumerate(answers)
    ]


def _drafts(head: Head, sequences: list[list[int]], first: int) -> list[Tensor]:
    """The head's outputs [rows, length - first, hidden] at every depth, from every position after the first ones."""
    target = head.target
    tokens = padded(sequences).to(target.device)
    following = F.pad(tokens[:, 1:], (0, DEPTH))
    pieces: list[list[Tensor]] = []
    for rows, after in zip(tokens.split(16), following.split(16), strict=True):
        hidden, tapped = target.read(rows, head.taps)
        features = torch.stack([*tapped, hidden], dim=2)
        pieces.append(head.unroll(features, after, DEPTH, first))
    return [torch.cat([piece[step] for piece in pieces]) for step in range(DEPTH)]


def summary(measured: Sequence[Measured], size: int) -> dict[str, Any]:
    """Shares of accepted prefixes by depth, and tokens per round of drafting one round after another."""
    prefix = []
    for depth in range(1, DEPTH + 1):
        # Near an answer's end there is nothing left to compare the deeper drafts with.
        lengths = [count for one in measured for count in one.accepted[size][: max(0, one.tokens - depth)]]
        prefix.append(round(sum(count >= depth for count in lengths) / max(len(lengths), 1), 4))
    rounds = {
        str(depth): round(tokens_per_round([one.accepted[size] for one in measured], depth), 4)
        for depth in REPORTED_DEPTHS
    }
    return {
        "answers": len(measured),
        "tokens": sum(one.tokens for one in measured),
        "first": prefix[0],
        "prefix": prefix,
        "tokens_per_round": rounds,
    }


def tokens_per_round(accepted: Sequence[Sequence[int]], depth: int) -> float:
    """Rounds as the engine runs them: a round emits what was accepted and one more; the next begins after it."""
    rounds = emitted = 0
    for counts in accepted:
        at = 0
        while at < len(counts):
            step = min(min(counts[at], depth) + 1, len(counts) - at)
            emitted += step
            rounds += 1
            at += step
    return emitted / max(rounds, 1)


def table(measured: Sequence[Measured], size: int) -> dict[str, Any]:
    """All answers, those without loops, the loops themselves, and each category without loops."""
    straight = [one for one in measured if not one.looped]
    looped = [one for one in measured if one.looped]
    kinds = sorted({one.category for one in measured})
    return {
        "all": summary(measured, size),
        "without_loops": summary(straight, size),
        "loops": summary(looped, size),
        "by_category": {kind: summary([one for one in straight if one.category == kind], size) for kind in kinds},
    }


def choose_vocabulary(measured: Sequence[Measured], full: int, sizes: Sequence[int]) -> tuple[int, dict[str, float]]:
    """The smallest vocabulary that costs less than the tolerated share of tokens per round at depth 4."""
    rates = {size: tokens_per_round([one.accepted[size] for one in measured], 4) for size in (*sizes, full)}
    good = [size for size in sizes if rates[size] > (1 - TOLERATED) * rates[full]]
    return (min(good) if good else full), {str(size): round(rate, 4) for size, rate in rates.items()}
