"""The `model` drafter: a smaller model with the same tokenizer runs ahead; its cache follows the target's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.drawing import Drawing
from forerun.draft.protocol import Draft, Drafter, Want, draft_for_some
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import PromptMedia
from forerun.models.layers.rows import Target, make_pass

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


class ModelDrafter(Drafter):
    """Drafts for all sequences together: one catch-up pass, then one pass per depth."""

    name = "model"

    def __init__(self, model: Decoder, pool: PagePool, vocab: int, chunk: int, target: Target | None = None) -> None:
        """`target` runs its passes, where that is not the model itself."""
        if pool.states is not None:
            raise ForerunError(
                f"a {model.config.family} model cannot draft: its recurrent state does not go back to earlier tokens; "
                "use its own MTP head (--draft mtp) or another draft model"
            )
        self.model, self.pool, self.vocab, self.chunk = model, pool, vocab, chunk
        self._target = target or model
        self._states: dict[int, State] = {}

    def open(self, sequence_id: int, tokens: list[int], media: PromptMedia | None = None) -> None:  # noqa: ARG002
        self._states[sequence_id] = State(SequenceCache(self.pool), [])
        self.observe(sequence_id, tokens)

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        if max(tokens) >= self.model.config.vocab:
            raise ForerunError(f"the text has token {max(tokens)}, and its tokens end at {self.model.config.vocab - 1}")
        self._states[sequence_id].tokens += tokens

    def ready(self, sequence_id: int) -> bool:
        return len(self._states[sequence_id].tokens) < self.model.config.context

    def close(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            state.cache.release()

    def propose(self, wants: list[Want]) -> list[Draft]:
        """Nothing for a text that would leave the context that the draft model knows."""
        fits = [len(self._states[w.sequence_id].tokens) + w.depth <= self.model.config.context for w in wants]
        return draft_for_some(wants, fits, self._draft)

    def _draft(self, wants: list[Want]) -> list[Draft]:
        states = [self._states[want.sequence_id] for want in wants]
        for state, want in zip(states, wants, strict=True):
            state.rewind()
            room = len(state.tokens) + want.depth
            if state.cache.missing(room) > self.pool.free:
                raise MemoryError("the draft model's cache is full")
            state.cache.grow(room)
            self._prefill(state)
        drawing = Drawing(wants, self.vocab)
        rows = self._pass([(state, state.tokens[len(state.fed) :]) for state in states], prefill=False)
        for depth in range(max(want.depth for want in wants)):
            live = drawing.live(depth)
            if depth and live:
                rows = self._pass([(states[index], [drawing.tokens[index][-1]]) for index in live], prefill=False)
            drawing.draw(live, rows)
        return drawing.drafts()

    def _prefill(self, state: State) -> None:
        """Long stretches go in chunks of their own; what is left is caught up together with other sequences."""
        while (gap := len(state.tokens) - len(state.fed)) > FEW:
            tokens = state.tokens[len(state.fed) : len(state.fed) + min(self.chunk, gap - 1)]
            self._pass([(state, tokens)], prefill=True)

    def _pass(self, work: list[tuple[State, list[int]]], prefill: bool) -> Tensor:
        """Feed tokens to their sequences; logits after the last token of each, [sequences, vocabulary]."""
        feeding = [(state.cache, tokens) for state, tokens in work]
        logits = self._target.forward(make_pass(feeding, last_only=True, prefill=prefill)).logits
        for state, tokens in work:
            state.fed += tokens
            state.cache.commit(len(tokens))
        return logits
