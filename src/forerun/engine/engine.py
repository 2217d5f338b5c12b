"""Many sequences at once: each step is one round of all running sequences and at most one prefill chunk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.protocol import Drafter
from forerun.engine.acceptance import Priors
from forerun.engine.budget import cut_drafts
from forerun.engine.controller import LONG_LOOKUP, PLAIN, Controller, Decision, lookup_arm
from forerun.engine.costs import CostTable, Proportions
from forerun.engine.device_round import DeviceRounds
from forerun.engine.flight import Flight, Wish, runs_on_device, tries, uploads
from forerun.engine.following import announce, feed, switch_off, tell, wants_features
from forerun.engine.interrupts import interrupts_held
from forerun.engine.policy import DepthPolicy, Policy
from forerun.engine.request import MAX_DEPTH, Request
from forerun.engine.round import NOTHING, Turn, propose, run_round, verify
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, Status, TextSink
from forerun.engine.shadow import Shadow, foresee, judge
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Target, make_pass
from forerun.progress import Progress
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams

CHUNK = 512  # prompt tokens per prefill pass; borders are multiples of it from position 0
DEVICE_CHUNK = 2048  # on a GPU: launching a pass takes the host as long as many tokens take the device
DEEPEST = {"lookup": MAX_DEPTH, LONG_LOOKUP: MAX_DEPTH, "mtp": 6, "model": 8}  # drafts worth thinking about
THINK = 8  # rounds of a batch on a device between two thoughts about it; a sequence alone is thought about every time
HINTS = {
    "lookup": "use --draft off",
    "mtp": "give a head with --head FOLDER (forerun train-head makes one)",
    "model": "name one with --draft-model",
}


class Silence:
    """A sink for tokens nobody reads."""

    def push(self, token: int) -> tuple[str, bool]:  # noqa: ARG002
        return "", False

    def flush(self) -> str:
        return ""


class Engine:
    """Drive it with `submit` and `step`; read `sequence.emissions`."""

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
        proportions: Proportions | None = None,
        target: Target | None = None,
        device: DeviceRounds | None = None,
    ) -> None:
        """`unavailable`: why a drafter that a user may ask for is not among `drafters`. `proportions`: known costs."""
        self.model, self.pool, self.drafters = model, pool, drafters
        self.target, self.device = target or model, device  # what runs passes; what runs whole rounds, if anything
        self.vocab, self.context, self.max_width, self.chunk = vocab, context, max_width, chunk
        self.unavailable = dict(unavailable or {})
        self.scheduler = Scheduler(pool, context, max_sequences)
        self.warm = False
        self.proportions = proportions
        self.costs, self.priors = CostTable(proportions), Priors()  # learned about this machine and earlier requests
        self._general_costs = CostTable()  # of rounds that a device does not take as a whole
        self._shadows: list[Shadow] = []  # of the round under way
        self._wishes: list[Turn] = []  # what to do next, thought of while the last round ran
        self._ids = count()

    def submit(self, request: Request, sink: TextSink) -> Sequence:
        """Queue a request. One that can never run is refused here, with the reason."""
        prompt = len(request.prompt)
        if prompt >= self.context:
            more = " or raise max context" if self.context < self.model.config.context else ""
            raise ForerunError(f"the prompt has {prompt} tokens and the context holds {self.context}: shorten it{more}")
        limit = self.context if request.max_tokens is None else min(self.context, prompt + request.max_tokens)
        arms = self._arms(request)
        sequence = Sequence(
            id=next(self._ids),
            request=request,
            cache=SequenceCache(self.pool),
            history=TokenHistory(request.prompt),
            sink=sink,
            policy=self._policy(request, arms),
            limit=limit,
            tokens=list(request.prompt),
            arms=arms,
        )
        self.scheduler.submit(sequence)
        return sequence

    def _arms(self, request: Request) -> list[str]:
        """The drafters a request may use."""
        if request.draft == "off":
            return []
        if request.draft == "auto":
            names: list[str] = [name for name in ("mtp", "model", "lookup") if name in self.drafters]
            return names if request.draft_tokens is None else names[:1]
        if request.draft not in self.drafters:
            reason = self.unavailable.get(request.draft) or HINTS[request.draft]
            raise ForerunError(f"no {request.draft} drafter is loaded: {reason}")
        return [request.draft]

    def _policy(self, request: Request, arms: list[str]) -> Policy:
        """Measured time decides when the user leaves it to us; otherwise the one arm, as deep as told."""
        if request.draft == "auto" and request.draft_tokens is None:
            choices = [*arms, LONG_LOOKUP] if "lookup" in arms else arms
            costs = self.costs_of([request])
            deepest = {name: min(DEEPEST[name], self.max_width - 1) for name in choices}
            return Controller(
                {name: depth for name, depth in deepest.items() if depth > 0},
                costs,
                self.priors,
                request.kind,
                plain_first=not costs.known,
                steady=self.device is not None,
            )
        return DepthPolicy(arms[0] if arms else None, request.draft_tokens)

    def costs_of(self, requests: list[Request]) -> CostTable:
        """What rounds of such requests cost: a device may not take them as a whole."""
        return self.costs if self.device is None or all(map(runs_on_device, requests)) else self._general_costs

    def step(self) -> None:
        """Admit, prefill one chunk, run one round. Who interrupts it finds everything whole."""
        with interrupts_held():
            self.scheduler.admit()
        sequence = self.scheduler.prefilling()
        if sequence is not None:
            self._prefill(sequence)
        with interrupts_held():
            self._round()

    def _round(self) -> None:
        """One round of all who run, or the landing of the one under way."""
        if self.device is not None and self.device.flight is not None:
            self.land(go_on=True)
            return
        began = time.perf_counter()
        running = self.scheduler.running()
        wishes, self._wishes = self._wishes, []
        if [turn.sequence for turn in wishes] != running:
            wishes = self._decide(running)
        turns = [turn for wish in wishes if (turn := self._fit(wish)) is not None]
        # Making room for one sequence may have parked another that was already given a turn.
        turns = [turn for turn in turns if turn.sequence.status is Status.RUNNING]
        self._shadows = foresee(turns, self.drafters)
        if turns and self.device is not None and self.device.takes(turns, self.max_width):
            drafting = time.perf_counter()
            propose([turn for turn in turns if uploads(turn)], self.drafters, self.vocab)
            self.device.launch(turns, began, time.perf_counter() - drafting)
            self.land(go_on=True)
        elif turns:
            if self.device is not None:
                self.device.leave()
            costs = self.costs if self.device is None else self._general_costs
            run_round(turns, self.target, self.drafters, self.vocab, costs, began)
            self._judge()

    @interrupts_held()
    def land(self, go_on: bool) -> None:
        """Take in the round that is under way on a device, if any; with `go_on` the next one may start at once."""
        device = self.device
        if device is None or device.flight is None:
            return
        flight, free = device.flight, go_on and self.scheduler.prefilling() is None
        device.land(self.costs, self.scheduler.running() if free else None)
        self._judge()
        if device.flight is not None:
            self._think_ahead(device.flight)
        elif flight.wishes is not None:
            pairs = zip(flight.turns, flight.wishes, strict=True)
            self._wishes = [Turn(turn.sequence, wish.decision, NOTHING) for turn, wish in pairs]

    def _judge(self) -> None:
        judge(self._shadows)
        self._shadows = []

    def _think_ahead(self, flight: Flight) -> None:
        """Decide what comes after a round under way, by all that came before it: the device hides the work."""
        sequences = [turn.sequence for turn in flight.turns]
        controlled = any(isinstance(sequence.policy, Controller) for sequence in sequences)
        due = len(sequences) == 1 or flight.repeats % THINK == 0
        ends = any(s.status is not Status.RUNNING or s.remaining <= flight.shape.width for s in sequences)
        if not controlled or not due or ends or any(map(tries, flight.turns)):
            return
        wishes = self._decide(sequences)
        self._shadows = foresee(flight.turns, self.drafters)
        copied = {shadow.sequence.id: shadow.tokens for shadow in self._shadows}
        flight.wishes = [
            # A lookup has something to draft then only if it would have been right now.
            Wish(turn.decision, copied.get(turn.sequence.id, []) if turn.decision.drafter == "lookup" else [])
            for turn in wishes
        ]

    def _decide(self, sequences: list[Sequence]) -> list[Turn]:
        """Arm and depth for each."""
        turns = []
        for sequence in sequences:
            limit = min(sequence.remaining - 1, self.max_width - 1)
            decision = sequence.policy.decide(limit, self._available(sequence), len(sequences) - 1)
            turns.append(Turn(sequence, decision, NOTHING))
        if len(turns) > 1:
            costs = self.costs_of([sequence.request for sequence in sequences])
            cut_drafts(turns, costs, on_device=self.device is not None)
        return turns

    def _fit(self, wish: Turn) -> Turn | None:
        """Make sure that all rows have a place in the answer and in the cache."""
        sequence, limit = wish.sequence, min(wish.sequence.remaining - 1, self.max_width - 1)
        if sequence.status is not Status.RUNNING:
            return None
        decision = wish.decision
        if decision.depth > limit:
            decision = Decision(decision.arm, limit) if limit else PLAIN
        for wanted in dict.fromkeys((decision, PLAIN)):
            if self.scheduler.make_room(sequence, sequence.cache.length + 1 + wanted.depth):
                return Turn(sequence, wanted, NOTHING)
            if sequence.status is not Status.RUNNING:
                return None  # parked: it goes on when pages are free
        sequence.finish("length")
        return None

    def warm_up(self, filtered: bool, progress: Progress) -> None:
        """Before a request with `auto`: whatever it may choose has run before, and what rounds cost here is known."""
        if not self.scheduler.idle:
            return
        self.land(go_on=False)  # of a sequence that a stop string has ended
        device, timed = self.device, []
        if device is not None and device.graphs.real:
            timed = device.prepare(DEEPEST["mtp"], self.max_width, filtered, progress)
        if not self.warm:
            self.warm = True
            self._run_every_drafter()
        for shape, seconds in timed:
            if not shape.drafts:
                self.costs.learn(None, 0, shape.width, 0.0, seconds)
            else:
                self.costs.learn_draft("mtp", shape.drafts, seconds - self.costs.pass_seconds(shape.width))

    def _run_every_drafter(self) -> None:
        """Cold, and again to learn what its rounds cost."""
        prompt = tuple((31 * n + 5) % self.vocab for n in range(min(24, self.context // 2)))
        for rounds in (1, 3 if self.proportions is None else 1):
            self.costs = CostTable(self.proportions)
            for arm in ("off", *(name for name in ("mtp", "model") if name in self.drafters)):
                request = Request(prompt, SamplingParams(), 4 * rounds, draft=arm, draft_tokens=3)  # type: ignore[arg-type]
                sequence = self.submit(request, Silence())
                try:
                    while sequence.status is not Status.FINISHED and sequence.counters.rounds < rounds:
                        self.step()
                finally:
                    self.release(sequence)

    def _available(self, sequence: Sequence) -> dict[str, bool]:
        """Which arms have something to draft now. A long match of the lookup is an arm of its own."""
        if not isinstance(sequence.policy, Controller):
            return {}
        found = {}
        for name in list(sequence.arms):
            drafter = self.drafters[name]
            try:
                tell(sequence, drafter)
                ready = drafter.ready(sequence.id)
                found[name] = ready > 0
                if name == "lookup":
                    arm = lookup_arm(ready)
                    found |= {"lookup": arm == "lookup", LONG_LOOKUP: arm == LONG_LOOKUP}
            except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
                switch_off(sequence, drafter, error)
        return found

    def _prefill(self, sequence: Sequence) -> None:
        """One chunk of one prompt; after the last one the first token is chosen."""
        began = time.perf_counter()
        cache, prompt = sequence.cache, sequence.request.prompt
        start = cache.length
        stop = min(start + self.chunk - start % self.chunk, len(prompt))
        features = wants_features(sequence, self.drafters)
        batch = make_pass([(cache, list(prompt[start:stop]))], last_only=True, prefill=True, features=features)
        output = self.target.forward(batch)  # which may take seconds, and has no consequence yet
        with interrupts_held():
            cache.commit(stop - start)
            feed(sequence, self.drafters, output, 0, stop - start)
            if stop == len(prompt):
                announce(sequence, self.drafters)
                sequence.status = Status.RUNNING
                turn = Turn(sequence, PLAIN, NOTHING)
                for _, (_, token) in verify([turn], output, self.vocab):
                    sequence.emit(token, from_draft=False)
        sequence.counters.prefill_seconds += time.perf_counter() - began

    @interrupts_held()
    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence between two steps. Its state stays whole: `resume` goes on where it was."""
        self.land(go_on=False)
        if sequence.status is Status.WAITING:
            self.scheduler.waiting.remove(sequence)
        if sequence.status is not Status.FINISHED:
            sequence.finish("cancelled")

    @interrupts_held()
    def resume(self, sequence: Sequence, max_tokens: int | None = None) -> None:
        """Continue a sequence that was cancelled or reached its length, as if it had never stopped."""
        if sequence.finish_reason not in ("cancelled", "length"):
            raise ForerunError(f"a sequence that ended with {sequence.finish_reason!r} cannot be continued")
        if max_tokens is not None:
            sequence.limit = min(self.context, len(sequence.tokens) + max_tokens)
        if sequence.remaining <= 0:
            raise ForerunError("the sequence has reached its limit: give max tokens, or load with a larger context")
        sequence.finish_reason = None
        if sequence not in self.scheduler.active:
            sequence.status = Status.WAITING
            self.scheduler.waiting.append(sequence)
        elif sequence.cache.parked is not None:
            sequence.status = Status.PARKED
        else:
            sequence.status = sequence.resumed_status

    @interrupts_held()
    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of the rounds until `unpause`."""
        self.land(go_on=False)
        if sequence.status is Status.RUNNING:
            sequence.status = Status.PAUSED

    def unpause(self, sequence: Sequence) -> None:
        """Let a paused sequence take part again."""
        if sequence.status is Status.PAUSED:
            sequence.status = Status.RUNNING if sequence.cache.parked is None else Status.PARKED

    @interrupts_held()
    def release(self, sequence: Sequence) -> None:
        """Free everything a sequence holds."""
        self.cancel(sequence)
        self.scheduler.remove(sequence)
        for name in sequence.told:
            self.drafters[name].close(sequence.id)
        sequence.told.clear()
