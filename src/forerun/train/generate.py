"""Answers of the target to many prompts at once; the host looks in only every few dozen tokens."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.train.loops import is_looping, loop_starts
from forerun.train.target import FrozenTarget, StaticCache

LOOK_IN = 32  # tokens between two looks at what has ended
ALIGN = 64  # key lengths grow in these steps, so that kernels see few shapes
TAIL = 200  # tokens in which a running answer is searched for a loop
CACHE_SHARE = 0.4  # of the free memory, for keys and values
CPU_BYTES = 4 << 30


@dataclass(slots=True)
class AnsweredPrompt:
    """A prompt and what the model said, both as ids."""

    prompt: list[int]
    answer: list[int]
    temperature: float
    looped: bool


Noise = Callable[[int, int], Tensor]  # (index of the answer's token, rows) -> Gumbel noise [rows, vocabulary]


def answer_all(
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    ends: frozenset[int],
    *,
    tokens: int,
    batch: int | None = None,
    deadline: float = math.inf,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Iterator[AnsweredPrompt]:
    """Answers, in another order than the prompts'. Past the deadline no new batch begins, except the first."""
    for number, group in enumerate(_batches(target, prompts, tokens, batch)):
        if number and time.monotonic() > deadline:
            return
        heats = [temperatures[index] for index in group]
        written = write(target, [prompts[index] for index in group], heats, ends, tokens=tokens)
        for index, heat, (said, looped) in zip(group, heats, written, strict=True):
            yield AnsweredPrompt(prompts[index], said, heat, looped)
        on_batch(len(group))


def _batches(target: FrozenTarget, prompts: Sequence[list[int]], tokens: int, batch: int | None) -> Iterator[list[int]]:
    """Prompts of like length together, inside stretches of a few batches, so that any beginning is a fair sample."""
    size = batch or (2048 if target.device.type == "cuda" else 16)
    for start in range(0, len(prompts), 4 * size):
        near = sorted(range(start, min(start + 4 * size, len(prompts))), key=lambda index: len(prompts[index]))
        groups, at = [], 0
        while at < len(near):
            take = size
            longest = len(prompts[near[min(at + take, len(near)) - 1]]) + tokens + ALIGN
            room = share_of_memory(target.device, CACHE_SHARE)
            take = max(1, min(take, room // (longest * target.cache_bytes_per_token)))
            groups.append(near[at : at + take])
            at += take
        random.Random(start).shuffle(groups)
        yield from groups


def share_of_memory(device: torch.device, share: float) -> int:
    """Bytes: a share of the GPU memory that nobody uses, what torch holds for later included; a few GB on a CPU."""
    if device.type != "cuda":
        return CPU_BYTES
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(share * (torch.cuda.mem_get_info(device)[0] + held))


@torch.inference_mode()
def write(
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    ends: frozenset[int],
    *,
    tokens: int,
    noise: Noise | None = None,
    keep_loops: bool = False,
) -> list[tuple[list[int], bool]]:
    """One batch of answers (their end token included), cut where they loop, and whether they did."""
    device, rows = target.device, len(prompts)
    longest = max(map(len, prompts))
    width = -(-(longest + tokens + 1) // ALIGN) * ALIGN
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    heat = torch.tensor(temperatures, device=device)[:, None]
    stops = torch.tensor(sorted(ends), device=device)
    cache = target.new_cache(rows, width)
    logits = _prefill(target, padded(prompts).to(device), lengths, cache)

    out = torch.full((rows, tokens), -1, dtype=torch.int64, device=device)
    alive = torch.arange(rows, device=device)  # the row of the batch that each running row belongs to
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    positions = lengths.clone()
    for index in range(tokens):
        drawn = _gumbel(logits) if noise is None else noise(index, rows)[alive]
        chosen = (logits + heat * drawn).argmax(dim=-1)
        out[alive, index] = torch.where(ended, -1, chosen)
        ended |= torch.isin(chosen, stops)
        if index + 1 == tokens:
            break
        if index % LOOK_IN == LOOK_IN - 1:
            if not keep_loops:
                ended |= is_looping(out[alive, max(0, index + 1 - TAIL) : index + 1])
            going = (~ended).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < 0.75 * len(alive):
                cache.keep(going)
                alive, positions, chosen, heat = alive[going], positions[going], chosen[going], heat[going]
                ended = ended[going]
        length = min(width, -(-(longest + index + 1) // ALIGN) * ALIGN)
        logits = target.step(chosen, positions, cache, length)
        positions = positions + 1
    return _collect(out, keep_loops)


def padded(rows: Sequence[list[int]], filling: int = 0) -> Tensor:
    """[rows, length of the longest]: ids one below the other, with something behind the shorter ones."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filling)


def _prefill(target: FrozenTarget, tokens: Tensor, lengths: Tensor, cache: StaticCache) -> Tensor:
    """Logits after each prompt; a few sequences at a time, since a whole batch of activations is large."""
    rows, longest = tokens.shape
    at_once = max(1, 131072 // longest)
    pieces = []
    for start in range(0, rows, at_once):
        some = slice(start, start + at_once)
        view = StaticCache([keys[some] for keys in cache.keys], [values[some] for values in cache.values])
        hidden, _ = target.read(tokens[some], cache=view)
        each = torch.arange(len(hidden), device=hidden.device)
        pieces.append(hidden[each, lengths[some] - 1])
    return target.logits(torch.cat(pieces))


def _gumbel(logits: Tensor) -> Tensor:
    return -torch.empty_like(logits).exponential_().log_()


def _collect(out: Tensor, keep_loops: bool) -> list[tuple[list[int], bool]]:
    lengths = (out >= 0).sum(dim=1)
    cut = loop_starts(out, lengths)
    kept, full, rows = cut.tolist(), lengths.tolist(), out.cpu()
    shown = full if keep_loops else kept
    return [(rows[row, : shown[row]].tolist(), kept[row] < full[row]) for row in range(len(kept))]
