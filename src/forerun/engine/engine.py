"""The loop: plan a round, start it, deliver the one before it while it runs. Plain decoding is depth 0."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import count

import torch

from forerun.cache.pages import PagePool, SequenceCache
from forerun.device import free_memory
from forerun.draft.arms import ARMS, MAX_DEPTH
from forerun.draft.protocol import Drafter
from forerun.engine.drafters import Drafters, LowAcceptance
from forerun.engine.host import HostExecutor
from forerun.engine.interrupts import interrupts_held
from forerun.engine.ownership import Ownership
from forerun.engine.plan import Result, Round, Turn
from forerun.engine.request import Request
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, Status, TextSink
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Target
from forerun.policy.acceptance import Priors
from forerun.policy.batch import BatchPolicy
from forerun.policy.budget import cut_drafts
from forerun.policy.controller import Controller
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision, DepthPolicy, Policy
from forerun.sample.constraint import Constraint
from forerun.sample.history import TokenHistory

CHUNK = 512  # rows of prompts in a pass, where rows of prompts are rows like any other
UNRUN = 8  # tokens of a draft that is not run to compare; a round seldom emits more unless the lookup itself runs
THINK = 8  # rounds of a batch between two thoughts about it, where it runs ahead; one alone is thought about every time


class Engine:
    """Drive it with `submit` and `step`; read `sequence.emissions`. One thread at a time is inside."""

    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        drafters: dict[str, Drafter],
        *,
        vocab: int,
        context: int,
        max_sequences: int = 64,
        max_width: int = MAX_DEPTH + 1,
        chunk: int = CHUNK,
        unavailable: Mapping[str, str] | None = None,
        costs: CostTable | None = None,
        executor: HostExecutor | None = None,
        target: Target | None = None,
    ) -> None:
        """`unavailable`: why a drafter that a user may ask for is not among `drafters`.

        `executor`: of a device. `target`: runs the model's passes, where that is not the model itself.
        """
        self.model, self.pool, self.drafters = model, pool, Drafters(drafters, vocab, unavailable)
        self.costs, self.priors = costs or CostTable(), Priors()  # learned about this machine and earlier requests
        self.executor = executor or HostExecutor(
            target or model, self.drafters, self.costs, not pool.on_device, model.kernels.one_kind_of_row
        )
        self.vocab, self.context, self.max_width, self.chunk = vocab, context, max_width, chunk
        scheduler = self.scheduler = Scheduler(pool, context, max_sequences, free_memory(torch.device("cpu")) // 2)
        self.owner = Ownership(pool.device, lambda: scheduler.idle, scheduler.recount)
        self.low_acceptance = LowAcceptance()
        self.warm = False  # see `engine/warmup.py`
        self._under_way: Round | None = None
        self._repeats = 0  # rounds since the sequences or the way to run them changed
        self._ahead: list[Turn] = []  # what to do next, thought of while the last round ran
        self._batch = BatchPolicy()
        self._ids = count()

    def step(self) -> None:
        """One round. Who interrupts it finds every sequence whole; an exception is its sequence's alone."""
        with interrupts_held(), self.owner:
            self.scheduler.admit()
            done = self._finish(repeat=True)
            try:
                if self._under_way is None:
                    before, done = done, None
                    self._deliver(before)
                    # What a device waited for since its last round is part of the next; reading a prompt is not.
                    waited = before is not None and not before.read
                    self._start(self._schedule(before.ended if before and waited else time.perf_counter()))
            finally:
                self._deliver(done)
            if self.executor.runs_ahead:
                self._think_ahead()
            else:
                self._deliver(self._finish(repeat=False))

    def settle(self, whose: Sequence | None = None) -> None:
        """Take in the round under way, if any, and start no other. `whose`: only where this one takes part in it."""
        with interrupts_held(), self.owner:
            if whose is None or (self._under_way is not None and whose in self._under_way.sequences):
                self._deliver(self._finish(repeat=False))

    def _schedule(self, began: float) -> Round:
        """Who runs, with which arm and depth, and which stretch of a prompt is read; pages for all of them."""
        running = self.scheduler.running()
        self._take_in(running)
        turns, self._ahead = self._ahead, []
        if [turn.sequence for turn in turns] != running:
            turns = self._decide(running)
        # Making room for one sequence may park another that was already given a turn.
        turns = [turn for turn in turns if self._fit(turn)]
        turns = [turn for turn in turns if turn.sequence.status is Status.RUNNING]
        self._note_unrun(turns)
        self._repeats = 0
        return Round(turns, self._prompts(), began)

    def _take_in(self, running: list[Sequence]) -> None:
        """Now that drafts may pay, drafters follow those whose prompts they did not read.

        Not where rounds run ahead: the device half of a drafter counts a sequence's positions from its prompt on.
        """
        left_out = [sequence for sequence in running if sequence.left_out]
        if left_out and not self.executor.runs_ahead and self._batch.has_chosen_drafting(len(running)):
            for sequence in left_out:
                self.drafters.take_in(sequence, self.max_width - 1)

    def _may_repeat(self, turns: list[Turn]) -> bool:
        """Could these turns be the next round too, for all that is known before this one has ended?"""
        return not self.scheduler.prefilling() and [turn.sequence for turn in turns] == self.scheduler.running()

    def _goes_on(self, index: int, turn: Turn, tokens: list[int], drafted: int) -> bool:
        """Does nothing in what turn number `index` of the round gave speak against the same turn again?"""
        sequence, decision = turn.sequence, turn.decision
        if len(tokens) >= sequence.remaining or not sequence.request.stop_ids.isdisjoint(tokens):
            return False
        if (drafted or self._repeats) and sequence.policy.tries(decision):
            return False  # where drafts are made a round ahead, a trial begins with a round that has none yet
        ahead = self._ahead[index] if self._ahead else None
        return ahead is None or ahead.decision == decision or not ahead.holds_after(tokens)

    def _prompts(self) -> list[Turn]:
        """Stretches of prompts to read: as many rows as the budget has, the oldest first. Where rows of prompts are of
        another kind, one stretch, up to a border that is the same whatever was read before.
        """
        turns, rows = [], self.chunk
        for sequence in self.scheduler.prefilling():
            start, media = sequence.cache.length, sequence.request.media
            beside = len(self.scheduler.running())
            if start == 0 and beside and sequence.policy.measures and not self._batch.admits(1 + beside):
                self.drafters.leave_out(sequence)
                sequence.policy = self._controller(sequence)  # other rounds may be ahead of it now
            stop = start + (rows if self.executor.mixes else self.chunk - start % self.chunk)
            stop = min(stop if media is None else media.border(stop), sequence.prompt_length)
            turns.append(Turn(sequence, stop=stop))
            rows -= stop - start
            if rows <= 0 or not self.executor.mixes:
                break
        return turns

    def _decide(self, sequences: list[Sequence]) -> list[Turn]:
        """Arm and depth for each. Where a batch does not draft, or drafts with one arm, nobody is asked one by one."""
        arm, shared, drafts, others = self.executor.batch_arm, False, False, len(sequences) - 1
        if others > 0 and any(sequence.policy.measures for sequence in sequences):
            able = sum(bool(s.arms) if arm is None else arm in s.arms for s in sequences)
            drafts = self._batch.drafts(able, len(sequences))
            shared = not drafts or arm is not None
        turns = []
        for sequence in sequences:
            policy, limit, decision = sequence.policy, min(sequence.remaining, self.max_width) - 1, PLAIN
            if not shared or not policy.measures:
                available = self.drafters.available(sequence) if policy.measures else None
                decision = policy.decide(limit, available, others)
            elif drafts and arm in sequence.arms and limit > 0:
                decision = Decision(arm, min(ARMS[arm].first_depth, limit))
            turns.append(Turn(sequence, decision, shared=shared and policy.measures))
        if others > 0 and not shared:
            wishes = [(turn.sequence.policy, turn.decision) for turn in turns]
            cut = cut_drafts(wishes, self.executor.costs_of(sequences), self.executor.uniform)
            for turn, decision in zip(turns, cut, strict=True):
                turn.decision = decision
        return turns

    def _fit(self, turn: Turn) -> bool:
        """Make sure that all rows have a place in the answer and in the cache. False: it does not run now."""
        sequence, limit = turn.sequence, min(turn.sequence.remaining, self.max_width) - 1
        if sequence.status is not Status.RUNNING:
            return False
        if turn.decision.depth > limit:
            turn.decision = Decision(turn.decision.arm, limit) if limit else PLAIN
        for decision in dict.fromkeys((turn.decision, PLAIN)):
            if self.scheduler.make_room(sequence, sequence.cache.length + 1 + decision.depth):
                turn.decision = decision
                return True
            if sequence.status is not Status.RUNNING:
                return False  # parked: it goes on when pages are free
        sequence.finish("length")
        return False

    def _note_unrun(self, turns: list[Turn]) -> None:
        """Drafts that cost nothing and are not part of the round: what comes of them shows when it is delivered.

        So a lookup needs no trials: its record is kept in rounds of every arm.
        """
        for turn in turns:
            if turn.sequence.policy.measures and not turn.shared:
                turn.unrun = self.drafters.peek(turn.sequence, turn.decision.drafter, UNRUN)

    def _think_ahead(self) -> None:
        """Decide what comes after a round under way, by all that came before it: the executor hides the work."""
        self._ahead = []
        turns = [] if self._under_way is None else self._under_way.turns
        sequences = [turn.sequence for turn in turns]
        due = len(sequences) == 1 or self._repeats % THINK == 0
        if not due or not any(sequence.policy.measures for sequence in sequences):
            return
        widest = 1 + max(turn.decision.depth for turn in turns)
        stays = all(s.status is Status.RUNNING and s.remaining > widest and s.constraint is None for s in sequences)
        if not stays or any(turn.sequence.policy.tries(turn.decision) for turn in turns):
            return
        self._ahead = self._decide(sequences)
        self._note_unrun(turns)
        for turn, ahead in zip(turns, self._ahead, strict=True):
            # Who copies from the text has something to copy then only if it would have been right now.
            arm = ahead.decision.arm
            if arm is not None and ARMS[arm].at_once and turn.unrun:
                ahead.expected = turn.unrun[0][1]

    def _start(self, work: Round) -> None:
        if not work.turns and not work.prompts:
            return
        try:
            self.executor.start(work)
            self._under_way = work
        except Exception as error:  # noqa: BLE001 - whose fault it was is not known: none of them may go on
            for sequence in work.sequences:
                sequence.fail(error)

    def _finish(self, repeat: bool) -> Round | None:
        """The round under way, done. With `repeat` the same turns may have been started again by then."""
        work = self._under_way
        if work is None:
            return None
        try:
            self.executor.finish(work, self._goes_on if repeat and self._may_repeat(work.turns) else None)
        except Exception as error:  # noqa: BLE001 - as above
            self._under_way = None
            for turn in work.turns:
                turn.sequence.fail(error)
            return None
        self._under_way = work.again
        self._repeats += work.again is not None
        return work

    def _deliver(self, work: Round | None) -> None:
        """The only place that emits, counts, learns costs and teaches policies."""
        if work is None:
            return
        left, taken = deque([*work.read, *work.results]), []
        try:
            while left:
                if self._take(left[0]):
                    taken.append(left[0])
                left.popleft()
        except BaseException as error:
            for index, result in enumerate(left):
                if index == 0 or result.advanced:  # nobody knows how far it came
                    result.turn.sequence.fail(ForerunError(f"interrupted in the middle of a token ({error!r})"))
            raise
        # Where rounds do not run ahead, their sequences have waited for all of this but what prompts of others took.
        reading = sum(result.seconds for result in work.read)
        more = 0.0 if self.executor.runs_ahead else time.perf_counter() - work.ended - reading
        for costs, measured in work.times if work.typical else ():
            measured.seconds += more
            costs.learn_round(measured)
        plain = self._batch.plain_seconds(len(taken)) if len(taken) > 1 else 0.0
        for result in taken:
            sequence, turn = result.turn.sequence, result.turn
            sequence.counters.spend(result.took + more, result.drafting)
            if work.typical and result.tokens:
                seconds = result.seconds + more
                if turn.shared:
                    gain = len(result.tokens) * plain - seconds if plain and result.drafted else 0.0
                    sequence.policy.share(turn.decision, result.drafted, result.accepted, gain)
                else:
                    sequence.policy.learn(turn.decision, result.drafted, result.accepted, seconds)
            turn.judge_unrun(result.tokens)
        who, tokens = [result.turn.sequence.id for result in taken], sum(len(result.tokens) for result in taken)
        drafted = any(r.drafted for r in taken if r.turn.sequence.policy.measures)  # named arms do either way
        self._batch.delivered(who, work.ended, tokens, drafted, bool(work.read), work.typical, reading)

    def _take(self, result: Result) -> bool:
        """Emit what one sequence got; keep just the rows of tokens that were emitted before the last.

        True where it took part in a round. Whatever fails here, a sink above all, its sequence fails alone.
        """
        sequence, emitted = result.turn.sequence, 0
        if sequence.status not in (Status.RUNNING, Status.PREFILL):
            return False  # it ended while the round was under way
        if result.error is not None:
            sequence.fail(result.error)
            return not result.turn.is_prompt
        try:
            if result.turn.is_prompt:
                began = time.perf_counter()
                result.keep(0)  # all rows of the prompt that were read; drafters read it too
                result.seconds = time.perf_counter() - began
                sequence.counters.prefill_seconds += result.took + result.seconds
                sequence.prompt_logprobs += result.prompt_logprobs
                if result.tokens:
                    sequence.has_read_prompt()
            arm, logprobs = result.turn.decision.arm, result.logprobs
            for token in result.tokens:
                emitted += 1
                if sequence.emit(token, emitted <= result.accepted, arm, logprobs[emitted - 1] if logprobs else None):
                    self._batch.has_ended(len(sequence.answer))
                    break
        except Exception as error:  # noqa: BLE001 - see above
            sequence.fail(error)
        if result.turn.is_prompt:
            return False
        try:
            result.keep(emitted)
        except Exception as error:  # noqa: BLE001 - see above
            sequence.fail(error)
        result.accepted = min(result.accepted, emitted)
        if result.tokens:
            decision = result.turn.decision
            sequence.counters.count(decision.arm, result.drafted, result.accepted)
            if result.drafted and decision.drafter is not None and not result.turn.cut:
                self.low_acceptance.note(decision.drafter, result.drafted, result.accepted)
        return True

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
        prompt, arms = len(request.prompt), self.drafters.arms_for(request)
        limit = self.context if request.max_tokens is None else min(self.context, prompt + request.max_tokens)
        with self.owner:
            sequence = Sequence(
                id=next(self._ids),
                request=request,
                cache=SequenceCache(self.pool),
                history=TokenHistory(request.prompt),
                sink=sink,
                policy=DepthPolicy(arms[0] if arms else None, request.draft_tokens),
                limit=limit,
                tokens=list(request.prompt),
                arms=arms,
                constraint=constraint,
            )
            if request.draft == "auto" and request.draft_tokens is None:
                sequence.policy = self._controller(sequence)
            self.scheduler.waiting.append(sequence)
        return sequence

    def _controller(self, sequence: Sequence) -> Policy:
        """Measured time decides when the user leaves it to us."""
        costs, arms = self.executor.costs_of([sequence]), self.drafters.deepest(sequence, self.max_width - 1)
        kind, steady = sequence.request.kind, self.executor.runs_ahead
        return Controller(arms, costs, self.priors, kind, plain_first=not costs.known, steady=steady)

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
            self.executor.forget(sequence)
            self.scheduler.remove(sequence)
            self.drafters.close(sequence)
