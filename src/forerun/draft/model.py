"""The `model` drafter: a smaller model with the same tokenizer runs ahead; its cache follows the target's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.drawing import Drawing
from forerun.draft.protocol import Capture, Draft, SlotTensors, Want
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import PromptMedia
from forerun.models.layers.rows import make_pass

FEW = 16  # rows that are caught up in a decode pass


@dataclass(slots=True)
class State:
    """One sequence as the draft model sees it."""

    cache: SequenceCache
    tokens: list[int]  # committed by the target
    fed: list[int] = field(default_factory=list)  # in the draft cache, drafts of the last round included
    same: int = 0  # of them, from the first on, that are known to be the target's

    def rewind(self) -> None:
        """Keep what agrees with the target's text, forget the drafts it did not take."""
        # The last token is fed again when nothing is missing: its logits are what drafting starts from.
        most = min(len(self.fed), len(self.tokens) - 1)
        while self.same < most and self.fed[self.same] == self.tokens[self.same]:
            self.same += 1
        del self.fed[self.same :]
        self.cache.rewind(self.same)


class ModelDrafter:
    """Drafts for all sequences together: one catch-up pass, then one pass per depth."""

    name = "model"
    wants_features = False

    def __init__(self, model: Decoder, pool: PagePool, vocab: int, chunk: int) -> None:
        if pool.states is not None:
            raise ForerunError(
                f"a {model.config.family} model cannot draft: its recurrent state does not go back to earlier tokens; "
                "use its own MTP head (--draft mtp) or another draft model"
            )
        self.model, self.pool, self.vocab, self.chunk = model, pool, vocab, chunk
        self._states: dict[int, State] = {}

    def open(self, sequence_id: int, tokens: list[int], media: PromptMedia | None = None) -> None:  # noqa: ARG002
        self._states[sequence_id] = State(SequenceCache(self.pool), list(tokens))

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        self._states[sequence_id].tokens += tokens

    def feed(self, sequence_id: int, features: Tensor) -> None:
        """Needs no features."""

    def ready(self, sequence_id: int) -> bool:
        return sequence_id in self._states

    def peek(self, sequence_id: int, depth: int) -> list[int]:  # noqa: ARG002
        """Each draft is a pass: nothing is free."""
        return []

    def device_half(self, slots: SlotTensors, capture: Capture) -> None:
        """Its passes are launched by the host."""

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
        drawing = Drawing(wants, self.vocab)
        rows = self._catch_up(states)
        for depth in range(max(want.depth for want in wants)):
            live = drawing.live(depth)
            if depth and live:
                rows = self._feed([(states[index], [drawing.tokens[index][-1]]) for index in live])
            drawing.draw(live, rows)
        return drawing.drafts()

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
