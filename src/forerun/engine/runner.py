"""Runs a round at once: drafts, one target pass, choice. Plain decoding is depth 0, and a stretch of a prompt is rows
like any other.

Nothing here changes a sequence until `keep`: whatever is raised on the way, the round has not happened. What a GPU
runs ahead is in `engine/device_runner.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Some
from contextlib import nullcontext

import torch
from torch import Tensor

from forerun.cache.pages import SequenceCache
from forerun.draft.drawing import Drawing
from forerun.draft.protocol import RowDrafter
from forerun.engine.constrained import constrain, shorten
from forerun.engine.drafters import Drafters, sensible, want_of
from forerun.engine.interrupts import interrupts_let_through
from forerun.engine.plan import Outcome, Plan, Ticket, Turn
from forerun.engine.sequence import Logprob, Sequence
from forerun.errors import ForerunError
from forerun.kernels.interface import PassRows
from forerun.models.layers.media import MediaRows, media_of_pass
from forerun.models.layers.rows import Part, Pass, Target, make_pass, rows_of
from forerun.progress import Progress
from forerun.sample.acceptance import accept_coupled, accept_rejection
from forerun.sample.choose import choose, probabilities
from forerun.sample.logprobs import log_probabilities
from forerun.sample.row import RowError

PROMPT_ROWS = 16  # whose logits are there at once: as many as a round may have, whose bits were probed
AHEAD = 1  # positions that an assistant turns its queries beyond the last committed one, at most
STRETCH = 512  # tokens of a text that a draft model catches up with in one pass


class Runner:
    """On the host, a round after the other."""

    overlaps = False  # does a round go on while the one before is delivered?

    def __init__(self, target: Target, drafters: Drafters, restartable: bool = True) -> None:
        """`restartable`: a pass that failed half-way may be run again."""
        self.target, self.drafters, self.restartable = target, drafters, restartable
        # What draws its entries from features must go along with every pass, and so must a draft model with windows,
        # whose pages are given back on the way; another one catches up when it drafts.
        self.followers = frozenset(
            name
            for name, one in drafters.rows.items()
            if one.specs and (one.warm is not None or any(spec.window for spec in one.specs))
        )

    def start(self, plan: Plan) -> Ticket:
        """Run a round. What it raises leaves every sequence as it was."""
        turns = plan.turns
        ticket = Ticket(plan, drafting=self._draft(self.drafters.propose(turns)))
        for turn in turns:
            if turn.width:
                constrain(turn)
        sound = [turn for turn in turns if turn.error is None]
        found = {id(outcome.turn): outcome for outcome in (self._pass(sound) if sound else ())}
        ticket.outcomes = [found.get(id(turn)) or failed(turn, turn.error or AssertionError()) for turn in turns]
        ticket.seconds = time.perf_counter() - plan.began
        return ticket

    def outcomes(self, ticket: Ticket) -> list[Outcome]:
        """What the turns of a round came to; waits for it."""
        return ticket.outcomes

    def keep(self, outcome: Outcome, count: int) -> None:
        """Keep the first `count` rows of a turn, forget the rest."""
        turn = outcome.turn
        sequence, cache = turn.sequence, turn.sequence.cache
        self.drafters.follow(sequence, turn.written_by, cache.length)
        cache.commit(count, outcome.features, self.drafters.entries(sequence))
        cache.edge = outcome.features[count - 1] if count and outcome.features is not None else None
        self._forget_rejected(sequence)

    def _forget_rejected(self, sequence: Sequence) -> None:
        """Entries that a draft model wrote for drafts that were rejected are none."""
        for entries in sequence.followed.values():
            if entries.stop is not None:
                entries.stop = min(entries.stop, sequence.cache.length)

    def waits_for(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Must its last tokens be known before a round of it can start?"""
        return False

    def threw_away(self, sequence: Sequence) -> None:
        """A round of a sequence that had ended before is delivered: nothing of it counts."""

    def prepare(self, widest: int, filtered: bool, progress: Progress, batch: int = 1) -> None:
        """Get ready for whatever one sequence may want, at most `widest` rows, and for batches of up to so many."""

    def forget(self, sequence: Sequence) -> None:
        """A sequence leaves for good or for a while: the runner holds nothing of it any more."""

    # ---- drafts

    def _draft(self, turns: list[Turn]) -> dict[str, float]:
        """Drafts of row drafters, each for all its turns together. Returns the seconds that each took."""
        took = {}
        for name, drafter in self.drafters.rows.items():
            mine = [turn for turn in turns if turn.decision.drafter == name]
            if mine:
                began = time.perf_counter()
                self._guarded(drafter, mine, self._draft_together)
                took[name] = time.perf_counter() - began
        return took

    def _guarded(self, drafter: RowDrafter, turns: list[Turn], work: Callable[[RowDrafter, list[Turn]], None]) -> None:
        """Work for several turns; where it fails they are tried one by one, to find whose drafter is switched off."""
        try:
            work(drafter, turns)
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            if len(turns) == 1:
                self.drafters.switch_off(turns[0].sequence, drafter.name, error)
                return
            for turn in turns:
                self._guarded(drafter, [turn], work)

    def _draft_together(self, drafter: RowDrafter, turns: list[Turn]) -> None:
        """Draw tokens depth by depth. Entries written on the way lie behind the text until they are written again."""
        if drafter.warm is None:
            for turn in turns:
                self._catch_up(drafter, turn.sequence)
        caches = [turn.sequence.cache for turn in turns]
        drawing = Drawing([want_of(turn) for turn in turns], drafter)
        hidden = drafter.begin(edges(caches, drafter.features) if drafter.features else None)
        before, rows, pool = list(range(len(turns))), self._entries(drafter, turns, 0), caches[0].pool
        for step in range(max(turn.decision.depth for turn in turns)):
            live = drawing.live(step)
            if not live:
                break
            if live != before:
                hidden = None if hidden is None else hidden[[before.index(index) for index in live]]
                before, rows = live, self._entries(drafter, [turns[index] for index in live], step)
            elif step:
                further = drafter.place(step) - drafter.place(step - 1)
                rows.position += further
                rows.longest += further
            tokens = [(drawing.tokens[index] or [turns[index].sequence.pending])[-1] for index in live]
            batch = Pass(torch.tensor(tokens, device=pool.device), rows, pool.layers, None)
            hidden, logits = drafter.step(step, hidden, batch)
            drawing.draw(live, logits)
        for turn, draft in zip(turns, drawing.drafts(), strict=True):
            turn.draft = sensible(draft, turn.decision.depth, self.drafters.vocab)
            if drafter.warm is None:  # the entries of accepted drafts are true ones
                stop = turn.sequence.cache.length + len(turn.draft.tokens)
                self.drafters.reached(turn.sequence, drafter.name, stop)

    def _entries(self, drafter: RowDrafter, turns: list[Turn], step: int) -> PassRows:
        """Rows of a step, which see true entries only."""
        place, caches = drafter.place(step), [turn.sequence.cache for turn in turns]
        rows = rows_of([Part(cache, cache.length + place, 1) for cache in caches])
        rows.longest += AHEAD
        firsts = [turn.sequence.followed.get(drafter.name) for turn in turns]
        if any(found is not None and found.start for found in firsts):
            numbers = [0 if found is None else found.start for found in firsts]
            rows.first = torch.tensor(numbers, dtype=torch.int32, device=caches[0].pool.device)
        return rows

    def _catch_up(self, drafter: RowDrafter, sequence: Sequence) -> None:
        """Entries of all tokens before the pending one, for a drafter whose entries depend on all before them."""
        cache = sequence.cache
        begin = self.drafters.has_until(sequence, drafter.name)
        if begin == cache.length:
            return
        while begin < cache.length:
            stop = min(begin + STRETCH, cache.length)
            rows = rows_of([Part(cache, begin, stop - begin, prompt=stop - begin > 1)])
            tokens = torch.tensor(sequence.tokens[begin:stop], device=cache.pool.device)
            drafter.follow(Pass(tokens, rows, cache.pool.layers, None), None)
            begin = stop
        self.drafters.reached(sequence, drafter.name, cache.length)

    # ---- the pass

    def _pass(self, turns: list[Turn]) -> list[Outcome]:
        """The target pass over all rows of all sequences, and what it gave each."""
        reading = any(turn.is_prompt for turn in turns)
        try:
            with interrupts_let_through() if reading else nullcontext():  # a long prompt takes seconds
                batch = self._rows(turns)
                output = self.target.forward(batch)
        except Exception as error:  # noqa: BLE001 - they are run one by one to find whose fault it was
            if len(turns) > 1 and self.restartable:
                return [outcome for turn in turns for outcome in self._pass([turn])]
            return [failed(turn, error) for turn in turns]
        starts, logits = batch.rows.query_start.tolist(), 0
        outcomes = []
        for index, turn in enumerate(turns):
            outcome = Outcome(turn, [])
            if output.features is not None:
                outcome.features = output.features[starts[index] : starts[index + 1]]
            outcomes.append((outcome, output.logits[logits : logits + turn.width]))
            logits += turn.width
        self._follow(turns, batch, [outcome for outcome, _ in outcomes])
        self._choose([(outcome, mine) for outcome, mine in outcomes if outcome.turn.width])
        for outcome, mine in outcomes:
            self._add_logprobs(outcome, mine)
        return [outcome for outcome, _ in outcomes]

    def _rows(self, turns: list[Turn]) -> Pass:
        """The rows of a pass. Where it reads prompts, only some have logits."""
        work = [(turn.sequence.cache, turn.tokens) for turn in turns]
        features = any(self.drafters.wants_features(t.sequence) or t.sequence.request.prompt_logprobs for t in turns)
        media = [turn.sequence.request.media if turn.is_prompt else None for turn in turns]
        wanted = [turn.width for turn in turns] if any(turn.is_prompt for turn in turns) else None
        return make_pass(work, wanted=wanted, features=features, media=media if any(media) else ())

    def _follow(self, turns: list[Turn], batch: Pass, outcomes: list[Outcome]) -> None:
        """Row drafters write the entries of the rows that they follow."""
        features = {id(outcome.turn): outcome.features for outcome in outcomes}
        for name, drafter in self.drafters.rows.items():
            mine = [turn for turn in turns if name in turn.written_by]
            if not mine:
                continue

            def write(drafter: RowDrafter, some: list[Turn]) -> None:
                found = None
                if drafter.features:
                    parts = [(turn.sequence.cache.edge, features[id(turn)]) for turn in some]
                    found = torch.cat([before_rows(edge, own, drafter.features) for edge, own in parts])
                drafter.follow(batch if len(some) == len(turns) else rows_again(some), found)

            self._guarded(drafter, mine, write)

    # ---- the choice

    def _choose(self, outcomes: list[tuple[Outcome, Tensor]]) -> None:
        """What each sequence emits. One that cannot go on fails alone."""
        try:
            self._choose_together(outcomes)
        except Exception as error:  # noqa: BLE001 - one of them has no token left to choose: find out which
            if len(outcomes) > 1:
                for one in outcomes:
                    self._choose([one])
                return
            (outcome, logits), turn = outcomes[0], outcomes[0][0].turn
            if isinstance(error, RowError) and error.row:
                shorten(turn, error.row - 1)  # plain decoding may never come to that row
                self._choose([(outcome, logits[: turn.width])])
            else:
                outcome.error = error

    def _choose_together(self, outcomes: list[tuple[Outcome, Tensor]]) -> None:
        """Accepted drafts and the token after them: one vectorised choice for all that compare with it."""
        coupled = [one for one in outcomes if one[0].turn.sequence.request.accept == "coupled"]
        if coupled:
            logits = coupled[0][1] if len(coupled) == 1 else torch.cat([mine for _, mine in coupled])
            rows = [row for outcome, _ in coupled for row in outcome.turn.rows()]
            tokens, first = choose(logits, rows, self.drafters.vocab), 0
            for outcome, mine in coupled:
                accepted, final = accept_coupled(tokens[first : first + len(mine)], outcome.turn.draft.tokens)
                first += len(mine)
                self._chose(outcome, accepted, final)
        for outcome, mine in outcomes:
            if outcome.turn.sequence.request.accept == "rejection":
                self._chose(outcome, *self._reject(outcome.turn, mine))

    def _chose(self, outcome: Outcome, accepted: int, final: int) -> None:
        turn = outcome.turn
        outcome.tokens = [*turn.draft.tokens[:accepted], final]
        outcome.accepted, outcome.drafted = accepted, turn.drafted

    def _reject(self, turn: Turn, logits: Tensor) -> tuple[int, int]:
        """Rejection sampling: exact in distribution."""
        rows, q, vocab, bad = turn.rows(), turn.draft.probabilities, self.drafters.vocab, None
        try:
            p = probabilities(logits, rows, vocab)
        except RowError as error:  # of a row that may never be reached
            bad, p = error, torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
            p[:, 0] = 1.0
            p[: error.row] = probabilities(logits[: error.row], rows[: error.row], vocab)
        if q is not None and q.shape[1] != p.shape[1]:  # a drafter need not know ids that are never chosen
            q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
        found = accept_rejection(p, turn.draft.tokens, q, turn.sequence.request.sampling, len(turn.sequence.tokens))
        if bad is not None and found[0] >= bad.row:
            if not bad.row:
                raise ForerunError(str(bad))
            return bad.row - 1, turn.draft.tokens[bad.row - 1]  # accepted: it ends the round
        return found

    def _add_logprobs(self, outcome: Outcome, logits: Tensor) -> None:
        """The log probabilities that a request asks for. Where they fail, its sequence fails alone."""
        turn, vocab = outcome.turn, self.drafters.vocab
        request = turn.sequence.request
        try:
            if request.logprobs is not None and outcome.tokens:
                outcome.logprobs = logprobs_of(logits, outcome.tokens, request.logprobs, vocab)
            if turn.is_prompt and request.prompt_logprobs:
                assert outcome.features is not None
                after = list(request.prompt[turn.begin + 1 : turn.stop + 1])
                top = request.logprobs or 0
                outcome.prompt_logprobs = prompt_logprobs(self.target, outcome.features, after, top, vocab)
        except Exception as error:  # noqa: BLE001 - of these rows alone
            outcome.error = error


def failed(turn: Turn, error: Exception) -> Outcome:
    """A sequence that cannot go on."""
    return Outcome(turn, [], drafted=len(turn.draft.tokens), error=error)


def edges(caches: Some[SequenceCache], columns: int) -> Tensor:
    """The features at the last committed positions [sequences, columns]."""
    return torch.stack([cache.edge[-columns:] for cache in caches if cache.edge is not None])


def before_rows(edge: Tensor | None, features: Tensor | None, columns: int) -> Tensor:
    """The features of the position before each row of one sequence; zeros where there are none."""
    assert features is not None
    first = torch.zeros_like(features[:1]) if edge is None else edge[None]
    return torch.cat([first, features[:-1]])[:, -columns:]


def rows_again(turns: list[Turn]) -> Pass:
    """The rows of some turns, after the pass: nothing of the target's is run, so that no state takes part."""
    parts = []
    for turn in turns:
        cache = turn.sequence.cache
        parts.append(Part(cache, turn.begin if turn.is_prompt else cache.length, len(turn.tokens), turn.is_prompt))
    pool, rows = parts[0].cache.pool, rows_of(parts)
    media: MediaRows | None = media_of_pass(
        [
            (turn.sequence.request.media if turn.is_prompt else None, part.start, part.start + part.count)
            for turn, part in zip(turns, parts, strict=True)
        ],
        pool.device,
    )
    tokens = torch.tensor([token for turn in turns for token in turn.tokens], device=pool.device)
    return Pass(tokens, rows, pool.layers, None, media=media)


def logprobs_of(logits: Tensor, tokens: list[int], top: int, vocab: int) -> list[Logprob]:
    """Of one token for each of the first rows of `logits` [rows, V]."""
    rows = logits[: len(tokens)].float().cpu().numpy()
    return [Logprob(*log_probabilities(row, token, top, vocab)) for row, token in zip(rows, tokens, strict=True)]


def prompt_logprobs(target: Target, features: Tensor, tokens: list[int], top: int, vocab: int) -> list[Logprob]:
    """Of the token after each of the first rows with these features [rows, …]; the logits of a few at a time."""
    found: list[Logprob] = []
    for start in range(0, len(tokens), PROMPT_ROWS):
        some = tokens[start : start + PROMPT_ROWS]
        found += logprobs_of(target.logits(features[start : start + len(some)]), some, top, vocab)
    return found
