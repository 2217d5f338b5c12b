"""Answers with the target's features, kept on the device, and the batches that training takes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.train.generate import AnsweredPrompt
from forerun.train.head import Scales
from forerun.train.target import FrozenTarget

READ_TOKENS = 65_536  # tokens of one pass of the target
LOGIT_ROWS = 8192
SHORT_PROMPT, PROMPT_STEP = 160, 1.3  # prompts up to so many tokens are alike, longer ones within this factor
ALIGN = 64  # batches are as long as a multiple of this: matrix libraries plan anew for every shape they see
SIZED_PASSES, SIZED_ROWS = 4, 200_000  # enough to know the size of states


@dataclass(slots=True)
class Batch:
    """Right-padded sequences, and the rows of the loss in them."""

    features: Tensor  # [rows, length, parts, hidden]
    following: Tensor  # [rows, length + unroll - 1] the token after each position
    sequence: Tensor  # [n] the row of each position whose next token is drafted ...
    position: Tensor  # [n] ... and its place in it
    depth: Tensor  # [n] how many drafts may have led there: bases begin at the prompt's last token
    hidden: Tensor  # [n, hidden] the target's post-norm state there
    whole: Tensor  # [n] log-sum-exp of its logits
    first: int  # no base stands before this position


class FeatureStore:
    """Token ids and features of all sequences, one behind the other."""

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...], answers: Sequence[AnsweredPrompt]) -> None:
        self.target, self.taps = target, taps
        self.lengths = np.array([len(answer.prompt) + len(answer.answer) for answer in answers])
        self.prompts = np.array([len(answer.prompt) for answer in answers])
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))[:-1]
        total = int(self.lengths.sum())
        flat = np.empty(total, dtype=np.int64)
        for start, answer in zip(self.starts, answers, strict=True):
            flat[start : start + len(answer.prompt) + len(answer.answer)] = answer.prompt + answer.answer
        self.tokens = torch.from_numpy(flat).to(target.device)
        shape = (total, len(taps) + 1, target.config.hidden)
        self.features = torch.empty(shape, device=target.device, dtype=target.dtype)
        self.whole = torch.zeros(total, device=target.device)
        self.residual = 1.0
        self.mass = torch.zeros(target.config.vocab, device=target.device)  # per id, its chances at all answers' tokens

    @staticmethod
    def bytes_per_token(target: FrozenTarget, taps: tuple[int, ...]) -> int:
        """Device memory that a token takes here."""
        return (len(taps) + 1) * target.config.hidden * target.dtype.itemsize + 12

    @torch.inference_mode()
    def fill(self, on_batch: Callable[[int], None] = lambda _: None) -> None:
        """Read every sequence with the target."""
        order = np.argsort(self.lengths, kind="stable")
        last = len(self.target.config.layers) - 1
        taps = tuple(sorted({*self.taps, last}))
        sizes: list[Tensor] = []
        for chosen in _chunks(order, _aligned(self.lengths), READ_TOKENS):
            index, real = self._index(chosen)
            hidden, tapped = self.target.read(self.tokens[index], taps)
            if len(sizes) < SIZED_PASSES:
                sizes.append(_rms(tapped[taps.index(last)][real]))
            parts = [tapped[taps.index(tap)] for tap in self.taps] + [hidden]
            self.features[index[real]] = torch.stack(parts, dim=2)[real]
            self._sum_logits(hidden, chosen, index)
            on_batch(len(chosen))
        self.residual = float(torch.cat(sizes).median())  # not the mean: a sequence's first tokens are huge

    def scales(self) -> Scales:
        """Sizes of the target's states, from its own text."""
        return Scales(self.residual, float(_rms(self.features[:SIZED_ROWS, -1]).median()))

    def _index(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Where the padded positions of these sequences lie in the store, and which of them are real."""
        device = self.tokens.device
        lengths = _to(device, self.lengths[chosen])
        starts = _to(device, self.starts[chosen])
        places = torch.arange(int(_aligned(self.lengths[chosen]).max()), device=device)
        index = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        return index, places < lengths[:, None]

    def _sum_logits(self, hidden: Tensor, chosen: np.ndarray, index: Tensor) -> None:
        rows, places, _ = self._loss_rows(chosen)
        row, place = _to(hidden.device, rows), _to(hidden.device, places)
        states, where = hidden[row, place], index[row, place]
        for start in range(0, len(where), LOGIT_ROWS):
            some = slice(start, start + LOGIT_ROWS)
            logits = self.target.logits(states[some])
            whole = logits.logsumexp(dim=-1)
            self.whole[where[some]] = whole
            self.mass += logits.sub_(whole[:, None]).exp_().sum(dim=0)

    def _loss_rows(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions t whose next token the head drafts: the answer's first token to the one before its last.

        A base stands at the prompt's last token at the earliest, so t is reached by 0 … t - prompt drafts before it.
        """
        counts = np.maximum(self.lengths[chosen] - 1 - self.prompts[chosen], 0)
        rows = np.repeat(np.arange(len(chosen)), counts)
        ends = np.cumsum(counts)
        depth = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        return rows, depth + self.prompts[chosen][rows], depth

    def batch(self, chosen: np.ndarray, unroll: int) -> Batch:
        """These sequences, ready for the loss."""
        device = self.tokens.device
        index, _ = self._index(chosen)
        ends = _to(device, self.starts[chosen] + self.lengths[chosen] - 1)
        length = index.shape[1]
        places = torch.arange(1, length + unroll, device=device)
        following = torch.minimum(index[:, :1] + places, ends[:, None])
        rows, spots, depth = (_to(device, part) for part in self._loss_rows(chosen))
        where = index[rows, spots]
        return Batch(
            features=self.features[index],
            following=self.tokens[following],
            sequence=rows,
            position=spots,
            depth=depth,
            hidden=self.features[where, -1],
            whole=self.whole[where],
            first=max(int(self.prompts[chosen].min()) - 1, 0) // ALIGN * ALIGN,
        )

    def epoch(self, usable: np.ndarray, tokens: int, seed: int) -> list[np.ndarray]:
        """All sequences once, alike lengths together, in an order of their own.

        Long prompts of like length come together first of all: what a step costs begins where their answers do.
        """
        random = np.random.default_rng(seed)
        blurred = self.lengths[usable] * random.uniform(0.9, 1.1, len(usable))
        prompts = np.maximum(self.prompts[usable] * random.uniform(0.9, 1.1, len(usable)), SHORT_PROMPT)
        order = np.lexsort((blurred, np.floor(np.log(prompts / SHORT_PROMPT) / np.log(PROMPT_STEP))))
        groups = list(_chunks(usable[order], _aligned(self.lengths), tokens))
        return [groups[place] for place in random.permutation(len(groups))]


def _chunks(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Stretches of an order whose padded size stays within so many tokens."""
    start, longest = 0, 0
    for place, sequence in enumerate(order):
        longer = max(longest, int(lengths[sequence]))
        if place > start and longer * (place + 1 - start) > tokens:
            yield order[start:place]
            start, longer = place, int(lengths[sequence])
        longest = longer
    if start < len(order):
        yield order[start:]


def _aligned(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // ALIGN) * ALIGN


def _rms(states: Tensor) -> Tensor:
    return states.float().square().mean(-1).sqrt()


def _to(device: torch.device, array: np.ndarray) -> Tensor:
    """To the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
