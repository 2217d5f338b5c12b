"""Rounds as graphs, each in three captured parts: the pass; edit, choose and accept; the drafts for the next round."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.draft.protocol import FollowShape
from forerun.engine.batch_slots import BatchSlots
from forerun.engine.graphs import Graphs
from forerun.kernels.interface import PassRows
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Pass

MOST = 128  # rounds that are kept; each holds memory of its own for its result and its launches


class Shape(NamedTuple):
    """What a round is captured for."""

    slots: int
    width: int  # rows of each
    followed: bool  # does a drafter's device half take part?
    filtered: bool
    edited: bool  # are logits changed by biases, penalties or masks?
    drafts: int  # for the next round

    @property
    def rows(self) -> int:
        return self.slots * self.width

    @property
    def follow(self) -> FollowShape:
        """As the device half sees it."""
        return FollowShape(self.slots, self.width, self.drafts, self.edited)


class Work:
    """What the parts of a round hand on. Graphs remember where it was; nobody else needs to hold it."""

    tokens: Tensor  # [slots, width]
    before: Tensor  # [slots]: positions before the round
    logits: Tensor  # [slots · width, vocabulary]
    features: Tensor | None
    chosen: Tensor  # [slots, width]
    accepted: Tensor  # [slots]


class RoundGraphs:
    """Captured on first use, or before an answer; the least recently used go when there are many."""

    def __init__(self, decoder: Decoder, slots: BatchSlots, graphs: Graphs) -> None:
        self.decoder, self.slots, self.graphs = decoder, slots, graphs
        self.pool, self.half, self.vocab = slots.pool, slots.half, slots.vocab
        self._rounds: OrderedDict[Shape, list[Callable[[], Tensor]]] = OrderedDict()

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._rounds

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._rounds)

    def launch(self, shape: Shape) -> Tensor:
        """[slots, width + 2]: chosen tokens, accepted drafts, whether the first row was bad."""
        self._rounds.move_to_end(shape)
        parts = self._rounds[shape]
        parts[0]()
        result = parts[1]()
        for part in parts[2:]:
            part()
        return result

    def capture(self, shape: Shape) -> None:
        """A capture runs once, for nobody."""
        assert not shape.edited or self.slots.edits is not None, "a graph remembers the buffers it was captured with"
        if self.graphs.real:
            torch.cuda.synchronize(self.pool.device)  # buffers are written anew while copies may be under way
        while len(self._rounds) >= MOST:
            self._rounds.popitem(last=False)
        work, parts = Work(), []
        launches = [lambda: self._pass(shape, work), lambda: self._check(shape, work)]
        if shape.followed:
            launches.append(lambda: self._follow(shape, work))
        with self._for_nobody():
            for launch in launches:
                parts.append(self.graphs.capture(launch))
                if self.graphs.real:
                    parts[-1]()  # a capture computes nothing, and the next part reads what this one gives
        self._rounds[shape] = parts

    @contextmanager
    def _for_nobody(self) -> Iterator[None]:
        """All slots are idle: they write where nothing is kept. Afterwards they are as they were."""
        values = [*self.slots.idle_values(), *(() if self.half is None else self.half.idle_values())]
        saved = [(tensor, tensor.clone()) for tensor, _ in values]
        for tensor, idle in values:
            tensor.fill_(idle)
        try:
            yield
        finally:
            for tensor, before in saved:
                tensor.copy_(before)

    def seconds(self, shape: Shape) -> float:
        """Of a round for nobody; the best of a few."""
        took = []
        with self._for_nobody():
            for _ in range(4):
                began = time.perf_counter()
                self.launch(shape).tolist()
                took.append(time.perf_counter() - began)
        return min(took)

    def _pass(self, shape: Shape, work: Work) -> Tensor:
        slots, count, width = self.slots, shape.slots, shape.width
        drafts = slots.drafts[: width - 1, :count]
        work.tokens = torch.cat([slots.pending[None, :count], drafts]).T.contiguous()
        work.before = slots.position[:count].clone()
        states = () if self.pool.states is None else self.pool.states.layers
        tables = [table[:count] for table in slots.tables]
        rows = PassRows.uniform(width, work.before, tables, slots.recurrent[:count], states)
        batch = Pass(work.tokens.flatten(), rows, self.pool.layers, None, False, features=shape.followed)
        output = self.decoder.forward(batch)
        work.logits, work.features = output.logits, output.features
        return work.before

    def _check(self, shape: Shape, work: Work) -> Tensor:
        """Choose what plain decoding would emit after each row, accept what agrees, move every slot on."""
        from forerun.kernels.gpu.choosing import choose_tokens
        from forerun.kernels.gpu.committing import accept
        from forerun.kernels.gpu.editing import edit_rows, remember
        from forerun.kernels.gpu.filtering import find_limits

        slots, device, count, width = self.slots, self.pool.device, shape.slots, shape.width
        tokens, before, logits = work.tokens, work.before, work.logits

        def of_rows(values: Tensor) -> Tensor:
            return values[:count].repeat_interleave(width, dim=0)

        edits = slots.edits if shape.edited else None
        assert edits is not None or not shape.edited, "captured now, a round would never be edited"
        if edits is not None:
            edited = torch.empty(len(logits), self.vocab, dtype=torch.float32, device=device)
            edit_rows(logits, self.vocab, tokens, edits, edited)
            logits = edited
        work.chosen = torch.empty(count, width, dtype=torch.int64, device=device)
        bad = torch.empty(count, width, dtype=torch.int32, device=device)
        temperature, limits = of_rows(slots.temperature), None
        if shape.filtered:
            rest = of_rows(slots.top_k), of_rows(slots.top_p), of_rows(slots.min_p_offset)
            limits = find_limits(logits, self.vocab, temperature, *rest)
        places = (before[:, None] + torch.arange(1, width + 1, device=device)).flatten()
        into = work.chosen.view(-1), bad.view(-1)
        choose_tokens(logits, self.vocab, temperature, of_rows(slots.seed), places, *into, limits=limits)
        work.accepted = torch.empty(count, dtype=torch.int32, device=device)
        result = torch.empty(count, width + 2, dtype=torch.int64, device=device)
        states = self.pool.states
        state = (None, None, None) if states is None else (slots.recurrent[:count], states.kept, states.parity)  # type: ignore[union-attr]
        moved = slots.position[:count], work.accepted, slots.pending[:count], result
        accept(tokens, work.chosen, bad, slots.drafted[:count], slots.live[:count], *moved, *state)
        if edits is not None:
            remember(work.chosen, work.accepted, slots.live[:count], edits)
        if not shape.followed:
            slots.drafted[:count].zero_()  # drafts of the host are for one round; a device half sets its own
        return result

    def _follow(self, shape: Shape, work: Work) -> Tensor:
        assert self.half is not None and work.features is not None
        self.half.after_pass(shape.follow, work.features, work.chosen, work.before, work.accepted)
        return self.slots.drafted
