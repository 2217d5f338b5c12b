"""The `model` drafter: a smaller model with the same tokenizer runs ahead; its cache follows the target's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.protocol import Draft, Want
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.sample.acceptance import draw
from forerun.sample.choose import choose, probabilities
from forerun.sample.row import Row

FEW = 16  # rows that are caught up in a decode pass


@dataclass(slots=True)
class State:
    """One sequence as the draft model sees it."""

    cache: SequenceCache
    tokens: list[int]  # committed by the target
    fed: list[int] = field(default_factory=list)  # in the draft cache, drafts of the last round included

    def rewind(self) -> None:
        """Keep what agrees with the target's text, forget the drafts it did not take."""
        same = 0
        for mine, theirs in zip(self.fed, self.tokens, strict=False):
            if mine != theirs:
                break
            same += 1
        # The last token is fed again when nothing is missing: its logits are what drafting starts from.
        keep = min(same, len(self.tokens) - 1)
        del self.fed[keep:]
        self.cache.length = keep


class ModelDrafter:
    """Drafts for all sequences together: one catch-up pass, then one pass per depth."""

    name = "model"

    def __init__(self, model: Decoder, pool: PagePool, vocab: int, chunk: int) -> None:
        self.model, self.pool, self.vocab, self.chunk = model, pool, vocab, chunk
        self._states: dict[int, State] = {}

    def open(self, sequence_id: int, tokens: list[int]) -> None:
        self._states[sequence_id] = State(SequenceCache(self.pool), list(tokens))

    def observe(self, sequence_id: int, tokens: list[int], hidden: Tensor | None) -> None:  # noqa: ARG002
        self._states[sequence_id].tokens += tokens

    def close(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            state.cache.release()

    def propose(self, wants: list[Want]) -> list[Draft]:
        states = [self._states[want.sequence_id] for want in wants]
        for state, want in zip(states, wants, strict=True):
            state.rewind()
            room = len(state.tokens) + want.depth
            if state.cache.missing(room) > self.pool.free:
                raise MemoryError("the draft model's cache is full")
            state.cache.grow(room)
            self._prefill(state)
        drafts = [Draft([], None) for _ in wants]
        distributions: list[list[Tensor]] = [[] for _ in wants]
        rows = self._catch_up(states)
        for depth in range(max(want.depth for want in wants)):
            live = [index for index, want in enumerate(wants) if depth < want.depth]
            if depth:
                rows = self._feed([(states[i], [drafts[i].tokens[-1]]) for i in live])
            for place, index in enumerate(live):
                token, q = self._sample(rows[place], wants[index], drafts[index].tokens)
                drafts[index].tokens.append(token)
                if q is not None:
                    distributions[index].append(q)
        for draft, mine in zip(drafts, distributions, strict=True):
            draft.probabilities = torch.stack(mine) if mine else None
        return drafts

    def _sample(self, logits: Tensor, want: Want, drafted: list[int]) -> tuple[int, Tensor | None]:
        """Coupled drafts use the target's own noise; under rejection they must not."""
        row = Row(want.row.params, want.row.history, tuple(drafted), want.row.position + len(drafted), None)
        if not want.rejection or row.params.temperature == 0:
            return choose(logits[None], [row], self.vocab)[0], None
        q = probabilities(logits[None], [row], self.vocab)[0]
        return draw(q, row.params, row.position, stream=1), q

    def _prefill(self, state: State) -> None:
        """Long stretches go in chunks of their own; what is left is caught up together with other sequences."""
        while (gap := len(state.tokens) - len(state.fed)) > FEW:
            tokens = state.tokens[len(state.fed) : len(state.fed) + min(self.chunk, gap - 1)]
            self._pass([(state, tokens)], prefill=True)

    def _catch_up(self, states: list[State]) -> Tensor:
        return self._feed([(state, state.tokens[len(state.fed) :]) for state in states])

    def _feed(self, work: list[tuple[State, list[int]]]) -> Tensor:
        return self._pass(work, prefill=False)

    def _pass(self, work: list[tuple[State, list[int]]], prefill: bool) -> Tensor:
        """Feed tokens to their sequences; logits after the last token of each, [sequences, vocabulary]."""
        feeding = [(state.cache, tokens) for state, tokens in work]
        logits = self.model.forward(make_pass(feeding, last_only=True, prefill=prefill)).logits
        for state, tokens in work:
            state.fed += tokens
            state.cache.commit(len(tokens))
        return logits
