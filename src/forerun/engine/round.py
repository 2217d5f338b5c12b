"""One round for all running sequences: draft, one target pass, choose, commit. Plain decoding is depth 0."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from forerun.draft.protocol import Draft, Drafter, Want
from forerun.engine.controller import Decision
from forerun.engine.costs import CostTable
from forerun.engine.following import feed, switch_off, tell, wants_features
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError
from forerun.models.layers.rows import Output, Target, make_pass
from forerun.sample.acceptance import accept_coupled, accept_rejection
from forerun.sample.choose import choose, probabilities
from forerun.sample.row import Row

NOTHING = Draft([], None)


@dataclass(slots=True)
class Turn:
    """One sequence's part in a round."""

    sequence: Sequence
    decision: Decision
    draft: Draft
    start: int = 0  # its first row in the pass

    @property
    def width(self) -> int:
        return 1 + len(self.draft.tokens)

    def rows(self) -> list[Row]:
        """What `choose` must know about each row: the exact history before it, drafted tokens included."""
        sequence, drafts = self.sequence, self.draft.tokens
        first = len(sequence.tokens)  # absolute index of the first token this round emits
        return [
            Row(sequence.request.sampling, sequence.history, tuple(drafts[:row]), first + row, None)
            for row in range(self.width)
        ]


def run_round(
    turns: list[Turn], model: Target, drafters: dict[str, Drafter], vocab: int, costs: CostTable, began: float
) -> None:
    """Run one round; every sequence ends it consistent, whatever its drafter did. `began`: when deciding on it did."""
    propose(turns, drafters, vocab)
    drafting = time.perf_counter() - began
    output = forward(turns, model, features=any(wants_features(turn.sequence, drafters) for turn in turns))
    taken = [
        (turn, commit(turn, accepted, final, output, drafters))
        for turn, (accepted, final) in verify(turns, output, vocab)
    ]
    took = time.perf_counter() - began
    rows = sum(turn.width for turn in turns)
    if len(turns) == 1:  # what a drafter costs is known only when it drafted for one
        costs.learn(turns[0].decision.drafter, len(turns[0].draft.tokens), rows, drafting, took - drafting)
    else:
        costs.learn(None, 0, rows, 0.0, took - drafting, sequences=len(turns))
    for turn in turns:
        turn.sequence.counters.spend(took, drafting)
    for turn, accepted in taken:
        turn.sequence.policy.learn(turn.decision, len(turn.draft.tokens), accepted, took)


def propose(turns: list[Turn], drafters: dict[str, Drafter], vocab: int) -> None:
    """Ask each drafter once for all its sequences. One that fails costs speed, never a wrong token."""
    for name, drafter in drafters.items():
        mine = [turn for turn in turns if turn.decision.drafter == name and turn.decision.depth > 0]
        if not mine:
            continue
        try:
            wants = [want(turn, drafter) for turn in mine]
            drafts = drafter.propose(wants)
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            for turn in mine:
                switch_off(turn.sequence, drafter, error)
            continue
        for turn, draft in zip(mine, drafts, strict=True):
            turn.draft = sensible(draft, turn.decision.depth, vocab)


def want(turn: Turn, drafter: Drafter) -> Want:
    """Tell the drafter what was committed since it last drafted, then what is wanted."""
    sequence = turn.sequence
    tell(sequence, drafter)
    row = Row(sequence.request.sampling, sequence.history, (), len(sequence.tokens), None)
    return Want(sequence.id, turn.decision.depth, row, sequence.request.accept == "rejection")


def sensible(draft: Draft, depth: int, vocab: int) -> Draft:
    """Cut a draft at the first token that is not one, and at the depth asked for."""
    tokens = draft.tokens[:depth]
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab:
            tokens = tokens[:index]
            break
    return Draft(tokens, None if draft.probabilities is None else draft.probabilities[: len(tokens)])


def forward(turns: list[Turn], model: Target, features: bool) -> Output:
    """The target pass over all rows of all sequences."""
    work = [(turn.sequence.cache, [turn.sequence.pending, *turn.draft.tokens]) for turn in turns]
    batch = make_pass(work, last_only=False, features=features)
    for index, turn in enumerate(turns):
        turn.start = batch.start(index)
    return model.forward(batch)


def verify(turns: list[Turn], output: Output, vocab: int) -> list[tuple[Turn, tuple[int, int]]]:
    """Accepted count and final token of each sequence. A sequence that cannot go on fails alone."""
    coupled = [turn for turn in turns if turn.sequence.request.accept == "coupled"]
    results: list[tuple[Turn, tuple[int, int]]] = []
    try:
        results += zip(coupled, couple(coupled, output, vocab), strict=True)
        rest = [turn for turn in turns if turn.sequence.request.accept == "rejection"]
    except ForerunError:
        rest = turns  # one of them has no token left to choose: find out which
    for turn in rest:
        try:
            alone = couple([turn], output, vocab)[0] if turn in coupled else reject(turn, output, vocab)
            results.append((turn, alone))
        except ForerunError as error:
            turn.sequence.error = error
            turn.sequence.finish("error")
    return results


def couple(turns: list[Turn], output: Output, vocab: int) -> list[tuple[int, int]]:
    """Walk the tokens plain decoding would emit at each row, one vectorised choice for all of them."""
    if not turns:
        return []
    index = [row for turn in turns for row in range(turn.start, turn.start + turn.width)]
    logits = output.logits if len(index) == len(output.logits) else output.logits[index]
    tokens = choose(logits, [row for turn in turns for row in turn.rows()], vocab)
    results, offset = [], 0
    for turn in turns:
        results.append(accept_coupled(tokens[offset : offset + turn.width], turn.draft.tokens))
        offset += turn.width
    return results


def reject(turn: Turn, output: Output, vocab: int) -> tuple[int, int]:
    """Rejection sampling: exact in distribution."""
    logits = output.logits[turn.start : turn.start + turn.width]
    p, q = probabilities(logits, turn.rows(), vocab), turn.draft.probabilities
    if q is not None and q.shape[1] != p.shape[1]:  # a drafter need not know ids that nobody may choose
        q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
    return accept_rejection(p, turn.draft.tokens, q, turn.sequence.request.sampling, len(turn.sequence.tokens))


def commit(turn: Turn, accepted: int, final: int, output: Output, drafters: dict[str, Drafter]) -> int:
    """Emit the accepted drafts and the final token; keep just the rows of tokens that were emitted before the last.

    Returns how many drafts were accepted and emitted.
    """
    sequence, drafts = turn.sequence, turn.draft.tokens
    emitted = 0
    for token in [*drafts[:accepted], final]:
        emitted += 1
        if sequence.emit(token, from_draft=emitted <= accepted):
            break
    sequence.cache.commit(emitted)
    feed(sequence, drafters, output, turn.start, emitted)
    accepted = min(accepted, emitted)
    sequence.counters.count(turn.decision.arm, len(drafts), accepted)
    return accepted
