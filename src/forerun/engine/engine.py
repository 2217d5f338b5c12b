"""The loop: plan a round, start it, deliver the one before it while it runs. Plain decoding is depth 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile

import torch

from forerun.cache.pages import PagePool, SequenceCache
from forerun.device import free_memory
from forerun.draft.arms import MAX_DEPTH
from forerun.draft.protocol import Drafter
from forerun.engine.device_runner import DeviceRunner
from forerun.engine.drafters import Drafters, LowAcceptance
from forerun.engine.interrupts import interrupts_held
from forerun.engine.ownership import Ownership
from forerun.engine.plan import Outcome, Plan, Ticket, Turn
from forerun.engine.request import Request
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, Status, TextSink
from forerun.errors import ForerunError
from forerun.kernels.interface import CHUNK_ROWS
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Target
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision, NamedArm
from forerun.policy.policy import Policy
from forerun.policy.records import Ask, RoundPart, RoundResult
from forerun.sample.constraint import Constraint
from forerun.sample.history import TokenHistory

CHUNK = 512  # rows of prompts in a pass
UNRUN = 8  # tokens of a draft that is not run to compare; a round seldom emits more unless the lookup itself runs
SLOWDOWN = 2.5  # times as long as usual that a token of an answer may take while prompts are read
LEAST_ROWS, RECENT = 64, 0.1  # rows of prompts in a pass beside answers, at least; weight of the last round
NONE: frozenset[str] = frozenset()
READ_BY_HEADS = 256  # tokens: heads do not read a stretch of a prompt that ends so far before its end, it says little


@dataclass(slots=True)
class Pace:
    """How many rows of prompts a pass may have beside answers, so that no token takes much longer than without them."""

    slowdown: float  # times as long as it takes without prompts
    row: float = 0.0  # seconds that a row of a prompt adds, lately

    def learn(self, seconds: float, quiet: float, prompt_rows: int) -> None:
        """A round with prompts beside answers; `quiet`: seconds of one without."""
        more = max(0.0, seconds - quiet) / prompt_rows
        self.row += (RECENT if self.row else 1.0) * (more - self.row)

    def rows(self, most: int, quiet: float) -> int:
        """As many as the slowdown allows; few enough at the start that they tell what a row costs."""
        if not quiet:
            return most
        return max(LEAST_ROWS, min(most, int((self.slowdown - 1) * quiet / self.row))) if self.row else LEAST_ROWS


class Engine:
    """Drive it with `submit` and `step`; read `sequence.emissions`. One thread at a time is inside."""

    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        drafters: Mapping[str, Drafter],
        *,
        vocab: int,
        context: int,
        max_sequences: int = 64,
        max_width: int = MAX_DEPTH + 1,
        chunk: int = CHUNK,
        slowdown: float = SLOWDOWN,
        unavailable: Mapping[str, str] | None = None,
        costs: CostTable | None = None,
        target: Target | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """`unavailable`: why a drafter that a user may ask for is not among `drafters`. `chunk`: rows of prompts in a
        pass, at most. `slowdown`: times as long as usual that a token may take while prompts are read. `target`: runs
        the model's passes, where that is not the model itself. `prefix_cache`: do beginnings of texts stay after their
        sequences?
        """
        self.model, self.pool = model, pool
        self.drafters = Drafters(drafters, pool, vocab, unavailable)
        self.costs = costs or CostTable()  # learned about this machine
        if pool.on_device:
            self.runner: Runner = DeviceRunner(model, pool, self.drafters, context)
        else:
            self.runner = Runner(target or model, self.drafters)
        self.policy = Policy(self.costs, overlaps=self.runner.overlaps)
        self._cuts_prompts = pool.on_device and pool.states is not None
        self.chunk = max(chunk, CHUNK_ROWS) if self._cuts_prompts else chunk
        self.vocab, self.context, self.max_width = vocab, context, max_width
        host = free_memory(torch.device("cpu"))
        if prefix_cache:
            away = 0 if pool.device.type == "cpu" else host // 4  # copies beside a pool in the same memory gain nothing
            pool.prefix.serve(any_row=not self._cuts_prompts, chunk=CHUNK_ROWS, host_limit=away)
        scheduler = self.scheduler = Scheduler(pool, context, max_sequences, host // 2)
        self.owner = Ownership(pool.device, scheduler.recount)
        self.low_acceptance = LowAcceptance()
        self._pace = Pace(slowdown)
        self.warm = False  # see `engine/warmup.py`
        self._under_way: Ticket | None = None
        self._took_part: list[int] = []  # the sequences of the round before
        self._ids = count()

    # ---- the loop

    def step(self) -> None:
        """One round. After an interrupt every sequence is whole; an exception is its sequence's alone."""
        with interrupts_held(), self.owner:
            self._admit()
            plan = self._plan()
            if self._under_way is not None and (plan.needs_host or not plan.turns):
                self._deliver_last()
                self._admit()
                plan = replace(self._plan(), behind=True)
            before, self._under_way = self._under_way, None
            try:
                if plan.turns:
                    self._under_way = self._start(plan)
            finally:
                if before is not None:
                    self._deliver(before)
            if not self.runner.overlaps:
                self._deliver_last()

    def settle(self, whose: Sequence | None = None) -> None:
        """Take in the round under way, if any, and start no other. `whose`: only where this one takes part in it."""
        with interrupts_held(), self.owner:
            ticket = self._under_way
            if ticket is not None and (whose is None or any(turn.sequence is whose for turn in ticket.plan.turns)):
                self._deliver_last()

    def _deliver_last(self) -> None:
        ticket, self._under_way = self._under_way, None
        if ticket is not None:
            self._deliver(ticket)

    # ---- plan

    def _admit(self) -> None:
        """Sequences that have their pages begin, behind what was found of their prompts."""
        for sequence in self.scheduler.admit():
            self.drafters.found(sequence)

    def _plan(self) -> Plan:
        """The next round, from what is known: which sequences generate, with which arm, and which prompts are read."""
        plan = Plan([], time.perf_counter())
        running = [s for s in self.scheduler.active if self._generates(s) and s.remaining > s.is_under_way]
        before = self._under_way
        if before is not None and (before.reads_back or any(map(self.runner.waits_for, running))):
            return replace(plan, needs_host=True)
        plan.waited = bool(running) and self.policy.wants_tokens([sequence.id for sequence in running])
        if plan.waited and before is not None:
            return replace(plan, needs_host=True)
        for sequence, decision in zip(running, self._decide(running, plan.waited), strict=True):
            turn = Turn(sequence, decision, follows=self._follows(sequence))
            if self._fits(turn, plan):
                plan.turns.append(turn)
        # Making room for one sequence may have parked another that already had a turn.
        plan.turns = [turn for turn in plan.turns if self._generates(turn.sequence)]
        rows = len(plan.turns) + sum(turn.decision.depth for turn in plan.turns)
        budget = self._pace.rows(self.chunk, self._quiet(rows, len(plan.turns))) if plan.turns else self.chunk
        plan.turns += self._prompts(budget)
        return plan

    def _quiet(self, rows: int, sequences: int) -> float:
        """Seconds of a pass of generated rows alone; 0: not known."""
        return self.costs.pass_seconds(rows, sequences) if self.costs.known else 0.0

    def _generates(self, sequence: Sequence) -> bool:
        """Does it, once the round under way has read the rest of its prompt?"""
        status = sequence.status
        if status is not Status.PREFILL:
            return status is Status.RUNNING
        return self._under_way is not None and sequence.planned == sequence.prompt_length

    def _decide(self, running: list[Sequence], texts: bool) -> list[Decision]:
        """Arm and depth of each. `texts`: text drafters may draft."""
        asks = []
        for sequence in running:
            if sequence.dropped:
                self._drop(sequence)
            limit = min(sequence.remaining - sequence.is_under_way, self.max_width) - 1
            known = not sequence.is_under_way and (texts or sequence.constraint is not None)
            asks.append(Ask(sequence.id, max(0, limit), self.drafters.available(sequence) if known else None))
        found = self.policy.decide(asks) if asks else []
        for index, (sequence, decision) in enumerate(zip(running, found, strict=True)):
            name = decision.drafter
            if name in self.drafters.rows:
                most = self.drafters.most(sequence, name)
                if not most:
                    found[index] = self.drafters.forced(sequence, decision.depth)
                elif most < decision.depth:
                    found[index] = Decision(decision.arm, most)
        return found

    def _drop(self, sequence: Sequence) -> None:
        """Drafters have failed for a sequence: they are not chosen again."""
        for name in sequence.dropped:
            self.policy.drop(sequence.id, name)
        sequence.dropped.clear()

    def _follows(self, sequence: Sequence) -> frozenset[str]:
        """Row drafters that write entries for its rows."""
        followers = self.runner.followers
        return self.policy.follows(sequence.id) & followers if followers else NONE

    def _fits(self, turn: Turn, plan: Plan) -> bool:
        """Pages for all its rows. False: it does not run now."""
        sequence = turn.sequence
        if not self._generates(sequence):
            return False  # it was parked for another one
        if sequence.reach + 1 + turn.decision.depth <= sequence.cache.room:
            return True  # most rounds end here
        for decision in dict.fromkeys((turn.decision, PLAIN)):
            if self._make_room(sequence, 1 + decision.depth, plan):
                turn.decision = decision
                return True
            if plan.needs_host or not self._generates(sequence):
                return False  # parked: it goes on when pages are free
        sequence.finish("length")
        return False

    def _make_room(self, sequence: Sequence, rows: int, plan: Plan) -> bool:
        """Pages for so many rows more. Before another sequence is parked for them, the round under way is taken in."""
        tokens = sequence.reach + rows
        if self._under_way is not None and not self.scheduler.has_room(sequence, tokens):
            plan.needs_host = True
            return False
        return self.scheduler.make_room(sequence, tokens)

    def _prompts(self, rows: int) -> list[Turn]:
        """Stretches of prompts to read: up to so many rows, the oldest first."""
        turns = list[Turn]()
        for sequence in self.scheduler.prefilling():
            begin = sequence.cache.length if self._under_way is None else sequence.planned
            end, media = sequence.prompt_length, sequence.request.media
            if begin == end:
                continue  # it is under way
            stop = self._border(begin, sequence.cache.cut(begin, begin + rows), end)
            if stop <= begin:
                break
            stop = min(stop if media is None else media.border(stop), end)
            follows = self._follows(sequence)
            if stop <= end - READ_BY_HEADS:  # but what must have all entries
                follows = frozenset(name for name in follows if self.drafters.rows[name].warm is None)
            turns.append(Turn(sequence, begin=begin, stop=stop, follows=follows))
            rows -= stop - begin
            if rows <= 0:
                break
        return turns

    def _border(self, begin: int, stop: int, end: int) -> int:
        """Where a stretch may end: the recurrences of a device cut prompts at multiples of `CHUNK_ROWS`."""
        if stop >= end or not self._cuts_prompts:
            return min(stop, end)
        return max(begin, stop - stop % CHUNK_ROWS)

    def _start(self, plan: Plan) -> Ticket | None:
        try:
            ticket = self.runner.start(plan)
        except Exception as error:  # noqa: BLE001 - whose fault it was is not known: none of them may go on
            for turn in plan.turns:
                turn.sequence.fail(error)
            return None
        for turn in plan.turns:
            if turn.is_prompt:
                turn.sequence.planned = turn.stop
            else:
                turn.reserved = 1 + turn.drafts
                turn.sequence.ahead += turn.reserved
        return ticket

    # ---- deliver

    def _deliver(self, ticket: Ticket) -> None:
        """The only place that emits, counts, learns costs and teaches the policy."""
        try:
            outcomes = self.runner.outcomes(ticket)
        except Exception as error:  # noqa: BLE001 - as above
            for turn in ticket.plan.turns:
                turn.sequence.fail(error)
            return
        left, taken = list(outcomes), list[RoundPart]()
        counted = [outcome for outcome in outcomes if takes_part(outcome.turn.sequence)]
        try:
            while left:
                part = self._take(left[0])
                if part is not None:
                    taken.append(part)
                left.pop(0)
        except BaseException as error:
            for outcome in left:
                outcome.turn.sequence.fail(ForerunError(f"interrupted in the middle of a token ({error!r})"))
            raise
        # Where rounds do not overlap, sequences have waited for all of this as well.
        seconds = ticket.seconds if self.runner.overlaps else time.perf_counter() - ticket.plan.began
        generating, prompts = ticket.plan.generating, [turn for turn in ticket.plan.turns if turn.is_prompt]
        ids = [turn.sequence.id for turn in generating]
        changed, self._took_part = ids != self._took_part, ids
        for outcome in counted:
            counters = outcome.turn.sequence.counters
            if outcome.turn.is_prompt:
                counters.prefill_seconds += seconds
            else:
                counters.spend(seconds, sum(ticket.drafting.values()))
        rows = sum(turn.stop - turn.begin for turn in prompts)
        widths = sum(1 + turn.drafts for turn in generating)
        if self.costs.known and not prompts:
            plain = self.costs.pass_seconds(len(generating), len(generating))
            running = {turn.sequence.id: turn.sequence for turn in generating}
            for part in taken:
                running[part.id].seconds_saved += part.tokens * plain - seconds
        if generating and rows and ticket.typical and (quiet := self._quiet(widths, len(generating))):
            self._pace.learn(seconds, quiet, rows)
        if taken:
            follows = NONE.union(*(turn.follows for turn in generating))
            # A device's own time does not tell whether sequences came or went, and rows of prompts take little of it.
            typical = ticket.typical and (self.runner.overlaps or not (changed or prompts))
            waited = ticket.plan.waited and self.runner.overlaps
            self.policy.learn(RoundResult(taken, seconds, follows, waited, typical, ticket.drafting, rows))

    def _take(self, outcome: Outcome) -> RoundPart | None:
        """Emit what one sequence got; keep just the rows of tokens that were emitted before the last.

        Whatever fails here, a sink above all, its sequence fails alone.
        """
        turn, sequence, emitted = outcome.turn, outcome.turn.sequence, 0
        sequence.ahead -= turn.reserved
        turn.reserved = 0  # an interrupt may make it come here again
        if not takes_part(sequence):
            self.runner.threw_away(sequence)
            return None  # it ended before: nothing of this round counts
        if outcome.error is not None:
            sequence.fail(outcome.error)
            return None
        unrun = self._unrun(outcome)
        try:
            if turn.is_prompt:
                self.runner.keep(outcome, turn.stop - turn.begin)
                sequence.prompt_logprobs += outcome.prompt_logprobs
                if outcome.tokens:
                    sequence.has_read_prompt()
            arm, logprobs = turn.decision.arm, outcome.logprobs
            for token in outcome.tokens:
                emitted += 1
                if sequence.emit(token, emitted <= outcome.accepted, arm, logprobs[emitted - 1] if logprobs else None):
                    break
        except Exception as error:  # noqa: BLE001 - see above
            sequence.fail(error)
        if turn.is_prompt:
            return None
        try:
            self.runner.keep(outcome, emitted)
        except Exception as error:  # noqa: BLE001 - see above
            sequence.fail(error)
        accepted = min(outcome.accepted, emitted)
        if not outcome.tokens:
            return None
        sequence.counters.count(turn.decision.arm, outcome.drafted, accepted)
        if outcome.drafted and turn.decision.drafter is not None and not turn.cut:
            self.low_acceptance.note(turn.decision.drafter, outcome.drafted, accepted)
        if unrun is not None:
            self.policy.watch(sequence.id, unrun)
        return RoundPart(sequence.id, turn.decision, outcome.drafted, accepted, emitted)

    def _unrun(self, outcome: Outcome) -> dict[str, tuple[int, int]] | None:
        """Drafts that cost nothing and were no part of the round, compared with what came: by arm how many, and how
        many were right. So a lookup needs no trials. None where the policy does not ask.
        """
        turn, sequence = outcome.turn, outcome.turn.sequence
        if turn.is_prompt or not self.policy.needs_watch(sequence.id):
            return None
        if turn.decision.drafter in self.drafters.texts:
            return None
        return {
            arm: (min(len(drafts), len(outcome.tokens)), leading(drafts, outcome.tokens))
            for arm, drafts in self.drafters.peek(sequence, turn.decision.drafter, UNRUN)
        }

    # ---- requests

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together: the context, or what the cache holds where that is less."""
        return self.scheduler.longest

    def check(self, request: Request) -> None:
        """Refuse a request that can never run, with the reason. Any thread may ask."""
        self.drafters.arms_for(request)
        self.scheduler.check(request, self.model.config)

    def submit(self, request: Request, sink: TextSink, constraint: Constraint | None = None) -> Sequence:
        """Queue a request. One that can never run is refused here, with the reason."""
        self.check(request)
        prompt = len(request.prompt)
        limit = self.context if request.max_tokens is None else min(self.context, prompt + request.max_tokens)
        with self.owner:
            sequence = Sequence(
                id=next(self._ids),
                request=request,
                cache=SequenceCache(self.pool),
                history=TokenHistory(request.prompt),
                sink=sink,
                limit=limit,
                tokens=list(request.prompt),
                arms=self.drafters.arms_for(request),
                constraint=constraint,
            )
            measured = request.draft == "auto" and request.draft_tokens is None
            named = NamedArm(sequence.arms[0], request.draft_tokens) if sequence.arms and not measured else None
            arms = self.drafters.deepest(sequence, self.max_width - 1) if measured else {}
            self.policy.join(sequence.id, arms, request.kind, named)
            self.scheduler.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence between two rounds. Its state stays whole: `resume` goes on where it was."""
        with interrupts_held(), self.owner:
            self.pause(sequence)
            if sequence.status is not Status.FINISHED:
                sequence.finish("cancelled")

    def resume(self, sequence: Sequence, max_tokens: int | None = None) -> None:
        """Continue a sequence that was cancelled or reached its length, as if it had never stopped."""
        with interrupts_held(), self.owner:
            if sequence.finish_reason not in ("cancelled", "length"):
                raise ForerunError(f"a sequence that ended with {sequence.finish_reason!r} cannot be continued")
            if sequence.given_up:
                raise ForerunError(
                    "this sequence was closed, or its memory went to others since it ended: ask again from its text"
                )
            if max_tokens is not None:
                sequence.limit = min(self.context, len(sequence.tokens) + max_tokens)
            if sequence.remaining <= 0:
                raise ForerunError("the sequence has reached its limit: give max tokens, or load with a larger context")
            self.settle(sequence)
            self.scheduler.take_back(sequence)
            sequence.finish_reason = None

    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of the rounds until `unpause`."""
        with interrupts_held(), self.owner:
            self.settle(sequence)
            self.scheduler.withdraw(sequence)
            if sequence.status is not Status.FINISHED:
                sequence.status = Status.PAUSED

    def unpause(self, sequence: Sequence) -> None:
        """Let a paused sequence take part again."""
        with interrupts_held(), self.owner:
            if sequence.status is Status.PAUSED:
                self.scheduler.take_back(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free everything a sequence holds."""
        with interrupts_held(), self.owner:
            self.cancel(sequence)
            self.runner.forget(sequence)
            self.scheduler.remove(sequence)
            self.drafters.close(sequence)
            self.policy.leave(sequence.id)


def takes_part(sequence: Sequence) -> bool:
    """Does what a round gave it count? One that ended or left meanwhile has no part in it."""
    return sequence.status in (Status.RUNNING, Status.PREFILL)


def leading(drafts: list[int], tokens: list[int]) -> int:
    """How many of the first drafts are the tokens that came."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, tokens, strict=False)))
