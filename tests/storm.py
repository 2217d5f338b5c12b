"""A storm: many random requests with lives of their own, some of them with injected faults, in one engine at once.

Whatever happens around it, a request gets the answer it would have got alone by plain decoding. One that is given up
has a beginning of it, and so has one that fails, with its error.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from engines import VOCAB, NoText, finish, request
from rules import Breaking, ByRule, Rule

from forerun.draft.protocol import is_row_drafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.rows import Pass, Target

FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.05}, {"top_k": 5}]
EDITS: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"logit_bias": {17: 3.0, 40: -2.0}, "suppress": frozenset({9, 33})},
]
HAPPENS = ("run", "run", "pause", "cancel", "give up", "linger")


class Broken(Exception):
    """An injected fault."""


@dataclass
class Visit:
    """One request and what happens to it, by steps of the engine since it came."""

    request: Request
    arrives: int
    more: int  # tokens it is continued by once it has reached its first maximum
    happens: str  # one of HAPPENS
    begin: int  # when that happens
    end: int  # when it goes on: unpaused, resumed, released
    fault: str | None  # a method of a drafter, or "sink"
    spared: int  # calls of it that go well
    sequence: Sequence | None = None
    rule: Rule | None = None  # what may come next in its answer

    def constraint(self) -> ByRule | None:
        """One for each run of it."""
        return None if self.rule is None else ByRule(self.rule, VOCAB)


class BreakingSink(NoText):
    """Fails at a token."""

    def __init__(self, spared: int) -> None:
        self.spared = spared

    def push(self, token: int) -> tuple[str, bool]:
        self.spared -= 1
        if self.spared < 0:
            raise Broken("no more text")
        return super().push(token)


def random_visit(dice: random.Random, arms: list[str], faults: list[str], tokens: int, arrives: int) -> Visit:
    """Prompts of all kinds: short, over several chunks, repeating themselves."""
    motif = [dice.randrange(4, VOCAB) for _ in range(dice.choice([1, 3, 20]))]
    options: dict[str, Any] = {"temperature": dice.choice([0.0, 0.7, 1.2]), "seed": dice.randrange(1000)}
    options |= dice.choice(FILTERS) | dice.choice(EDITS)
    arm, depth = dice.choice(arms), dice.choice([None, 1, 2, 5])
    open_ended = dice.random() < 0.15
    wish = request(
        (motif * 20)[: dice.randint(1, 20)],
        max_tokens=None if open_ended else dice.randint(1, tokens),
        draft=arm,
        draft_tokens=None if arm == "auto" else depth,
        stop_ids=frozenset(dice.sample(range(VOCAB), 8)) if dice.random() < 0.3 else frozenset(),
        **options,
    )
    begin = dice.randint(0, 3 * tokens)
    return Visit(
        wish,
        arrives,
        more=0 if open_ended or dice.random() < 0.7 else dice.randint(1, tokens),
        happens=dice.choice(HAPPENS),
        begin=begin,
        end=begin + dice.randint(1, 2 * tokens),
        fault=dice.choice(faults) if faults and dice.random() < 0.4 else None,
        spared=dice.choice([0, 0, 1, 3]),
    )


class Storm:
    """Runs visits through an engine and keeps what may be expected of each."""

    def __init__(self, engine: Engine, visits: list[Visit]) -> None:
        self.engine, self.visits = engine, visits
        self.step = 0
        self.live: list[Visit] = []
        self.faults: dict[int, tuple[str, int]] = {}  # by sequence: what fails, and after how many calls
        self.struck: set[int] = set()  # sequences that may have ended with an error
        self.hit: dict[int, set[str]] = defaultdict(set)  # sequences whose drafters failed, and which
        self.seen: Counter[str] = Counter()
        for drafter in engine.drafters.by_name.values():
            self._let_break(drafter)

    def _let_break(self, drafter: Any) -> None:
        """Its methods fail when their turn comes; real ones, so that whatever knows the class goes on working."""
        if is_row_drafter(drafter) and self.engine.pool.on_device:
            return  # captured graphs run them
        if is_row_drafter(drafter):
            for name in ("follow", "step"):
                setattr(drafter, name, self._breaking_rows(drafter.name, name, getattr(drafter, name)))
            return
        for name in ("open", "observe", "ready", "close", "propose"):
            setattr(drafter, name, self._breaking(drafter.name, name, getattr(drafter, name)))

    def _breaking(self, arm: str, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def method(first: Any, *rest: Any) -> Any:
            ids = [want.sequence_id for want in first] if name == "propose" else [first]
            due = [self._is_due(id, name) for id in ids]
            if not any(due):
                return usual(first, *rest)
            for id in ids:  # one call drafts for all
                self.hit[id].add(arm)
            self.seen[f"fault in {name}"] += 1
            if name == "close":
                usual(first, *rest)
            raise Broken(f"{name} of {arm}")

        return method

    def _breaking_rows(self, arm: str, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        """It fails for all whose rows stand in one pass, again and again: who it was must be found out."""

        def method(*given: Any) -> Any:
            batch = next(each for each in given if isinstance(each, Pass))
            due = [id for id in self._whose(batch) if self._is_due(id, name, for_good=True)]
            if not due:
                return usual(*given)
            for id in due:
                self.hit[id].add(arm)
            self.seen[f"fault in {name}"] += 1
            raise Broken(f"{name} of {arm}")

        return method

    def _whose(self, batch: Pass) -> list[int]:
        """The sequences whose rows these are, by the first page of each."""
        whole = next(number for number, group in enumerate(self.engine.pool.groups) if not group.window)
        running = [visit.sequence for visit in self.live if visit.sequence is not None]
        owner = {s.cache.blocks[whole][0]: s.id for s in running if s.cache.blocks[whole]}
        return [owner[page] for page in batch.rows.block_tables[whole][:, 0].tolist()]

    def _is_due(self, id: int, name: str, for_good: bool = False) -> bool:
        fault, spared = self.faults.get(id, ("", 0))
        if fault != name:
            return False
        self.faults[id] = (fault, spared - 1)
        return spared == 0 or (for_good and spared < 0)

    def break_passes(self, errors: dict[int, Exception]) -> None:
        """The n-th pass of the target raises."""
        target = target_of(self.engine)
        usual, passes = target.forward, 0

        def forward(*args: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes in errors:
                running = [v.sequence for v in self.live if v.sequence is not None]
                self.struck |= {s.id for s in running if s.status in (Status.RUNNING, Status.PREFILL)}
                self.seen["fault in a pass"] += 1
                raise errors[passes]
            return usual(*args)

        target.forward = forward  # type: ignore[method-assign]

    @torch.inference_mode()
    def run(self, longest: int = 20_000) -> None:
        """Until everybody has gone."""
        coming = sorted(self.visits, key=lambda visit: visit.arrives, reverse=True)
        while coming or self.live:
            while coming and coming[-1].arrives <= self.step:
                self._arrive(coming.pop())
            for visit in list(self.live):
                self._live(visit)
            self.engine.step()
            for sequence in [visit.sequence for visit in self.live if visit.sequence is not None]:
                if sequence.cache.parked is not None:
                    self.seen["parked" if sequence.status is Status.PARKED else "parked while idle"] += 1
            if self.step % 16 == 0:
                self._check_pages()
            self.step += 1
            assert self.step < longest, "the engine does not come to an end"
        self._check_pages()
        assert self.engine.scheduler.idle

    def _check_pages(self) -> None:
        self.engine.pool.check([visit.sequence.cache for visit in self.live if visit.sequence is not None])

    def _arrive(self, visit: Visit) -> None:
        sink = BreakingSink(visit.spared) if visit.fault == "sink" else NoText()
        constraint = visit.constraint()
        if visit.rule is not None and visit.fault in ("legal", "masks", "forced", "commit"):
            constraint = Breaking(visit.rule, VOCAB, visit.fault, visit.spared)
        sequence = visit.sequence = self.engine.submit(visit.request, sink, constraint)
        if visit.fault == "sink" or isinstance(constraint, Breaking):
            self.struck.add(sequence.id)
        elif visit.fault is not None:
            self.faults[sequence.id] = (visit.fault, visit.spared)
        self.live.append(visit)

    def _live(self, visit: Visit) -> None:
        """What its owner does now."""
        engine, sequence, age = self.engine, visit.sequence, self.step - visit.arrives
        assert sequence is not None
        done = sequence.status is Status.FINISHED
        if age == visit.begin and not done and visit.happens in ("pause", "cancel", "give up"):
            self.seen[visit.happens] += 1
            (engine.pause if visit.happens == "pause" else engine.cancel)(sequence)
        elif age == visit.end and sequence.status is Status.PAUSED:
            engine.unpause(sequence)
        elif done and sequence.finish_reason == "cancelled" and visit.happens == "cancel":
            if age >= visit.end:
                engine.resume(sequence)
        elif done and sequence.finish_reason == "length" and visit.more and sequence.remaining <= 0:
            self.seen["extended"] += 1
            engine.resume(sequence, visit.more)
            visit.more = 0
        elif done and (visit.happens != "linger" or age >= visit.end):
            engine.release(sequence)
            self.live.remove(visit)

    def compare(self, alone: Engine) -> None:
        """Every answer with the one the same request gets alone, read from its first token on."""
        alone.pool.prefix.enabled = False
        for visit in self.visits:
            sequence = visit.sequence
            assert sequence is not None
            names = set(self.hit[sequence.id])
            if sequence.id in self.struck:  # a pass that failed is run again without its row drafters
                names |= set(self.engine.drafters.rows)
            assert all(any(f"drafter {name} " in text for name in names) for text in sequence.warnings), (
                sequence.warnings
            )
            expected = plain_answer(alone, visit, sequence)
            likely = [emission.logprob for emission in sequence.emissions]
            assert likely == [emission.logprob for emission in expected.emissions][: len(likely)], visit
            if sequence.finish_reason in ("cancelled", "error"):
                assert sequence.answer == expected.answer[: len(sequence.answer)], visit
                assert (sequence.error is not None) == (sequence.finish_reason == "error")
                struck = sequence.id in self.struck or expected.error is not None  # a rule may leave nothing to choose
                assert sequence.error is None or struck, sequence.error
            else:
                assert (sequence.answer, sequence.finish_reason) == (expected.answer, expected.finish_reason), visit
                assert sequence.error is None
            self.seen[str(sequence.finish_reason)] += 1
            self.seen["drafted"] += sequence.counters.drafted
            self.seen["accepted"] += sequence.counters.accepted


def target_of(engine: Engine) -> Target:
    """What runs the passes."""
    return engine.runner.target


def plain_answer(engine: Engine, visit: Visit, sequence: Sequence) -> Sequence:
    """The same request by plain decoding, nobody beside it; as long as it became by being continued."""
    wish, extended = visit.request, sequence.limit - sequence.prompt_length
    most = wish.max_tokens if wish.max_tokens is None else max(wish.max_tokens, extended)
    alone = engine.submit(replace(wish, draft="off", draft_tokens=None, max_tokens=most), NoText(), visit.constraint())
    finish(engine, [alone])
    engine.release(alone)
    return alone
