"""A simulated machine and simulated answers, to see what a policy makes of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.draft.arms import ARMS
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision
from forerun.policy.policy import Policy
from forerun.policy.records import Ask, RoundPart, RoundResult

LIMIT = 15


@dataclass
class Machine:
    """What rounds take, in seconds; a plain pass of one sequence takes `plain` while the machine is quiet."""

    plain: float = 0.004
    row: float = 0.04  # of a plain pass, for each further row
    sequence: float = 0.0  # the same for each further sequence
    step: dict[str, float] = field(default_factory=dict)  # for one sequence, of a plain pass
    step_row: float = 0.2  # by how much a step grows for each further sequence, of itself, times `row`
    follow: dict[str, float] = field(default_factory=dict)
    wait: float = 0.0
    noise: float = 0.03
    drift: Callable[[float], float] = lambda seconds: 1.0  # how many times as long all takes now
    stolen: Callable[[float], float] = lambda seconds: 0.0  # more time for each further row
    overlaps: bool = False

    def times(self, rows: int, sequences: int, now: float) -> float:
        return 1 + (self.row + self.stolen(now)) * (rows - 1) + self.sequence * (sequences - 1)


@dataclass
class Answer:
    """One request: how often drafts of each arm are right, by the share of the answer that is written."""

    length: int
    rates: Callable[[str, float], float]
    offered: Callable[[str, float], float] = lambda arm, done: 0.0  # how often a text arm has something
    kind: str = "short"
    id: int = 0
    done: int = 0
    offers: dict[str, int] = field(default_factory=dict)

    def accepted(self, arm: str, depth: int, dice: random.Random) -> int:
        count = 0
        rate = self.rates(arm, self.done / self.length)
        while count < depth and dice.random() < rate:
            count += 1
        return count

    def look(self, arms: Sequence[str], dice: random.Random) -> dict[str, int]:
        done = self.done / self.length
        self.offers = {arm: LIMIT if dice.random() < self.offered(arm, done) else 0 for arm in arms}
        return self.offers


@dataclass
class Fixed:
    """Always one arm at one depth, or plain decoding: what a policy is compared with."""

    decision: Decision = PLAIN


@dataclass
class Score:
    tokens: int = 0
    seconds: float = 0.0
    decisions: list[tuple[Decision, ...]] = field(default_factory=list)
    followed: list[frozenset[str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    deciding: float = 0.0  # real seconds
    learning: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def serve(
    machine: Machine,
    answers: Sequence[Answer],
    arms: dict[str, int],
    clients: int,
    policy: Policy | Fixed | None = None,
    seed: int = 0,
) -> Score:
    """So many clients, each of which sends its next request when an answer ends."""
    dice, noise = random.Random(seed), random.Random(seed + 1)
    if policy is None:
        policy = Policy(CostTable(), overlaps=machine.overlaps)
    texts = [arm for arm in arms if ARMS[arm].at_once]
    waiting = list(reversed([replace_answer(answer, number) for number, answer in enumerate(answers)]))
    running: list[Answer] = []
    score = Score()
    queued: RoundResult | None = None
    watched: list[tuple[int, dict[str, tuple[int, int]]]] = []
    changed = True
    while waiting or running:
        while waiting and len(running) < clients:
            running.append(waiting.pop())
            changed = True
            if isinstance(policy, Policy):
                policy.join(running[-1].id, arms, running[-1].kind)
        if len(running) < clients:
            break  # what the last ones do alone depends on how they happened to end
        ids = [answer.id for answer in running]
        if isinstance(policy, Fixed):
            fixed = policy.decision
            waited = machine.overlaps and fixed.arm in texts
            follows = frozenset([fixed.drafter] if fixed.drafter and not ARMS[fixed.arm or ""].at_once else [])
            for answer in running:
                answer.look(texts, dice)
            decisions = [
                PLAIN
                if fixed.arm is None
                or (fixed.arm in texts and not answer.offers[fixed.arm])
                or answer.length - answer.done == 1
                else Decision(fixed.arm, min(fixed.depth, answer.length - answer.done - 1))
                for answer in running
            ]
        else:
            tokens = policy.wants_tokens(ids) and bool(texts)
            waited = machine.overlaps and tokens
            if waited and queued is not None:
                learn(policy, queued, watched, score)
                queued = None
            for answer in running:
                answer.look(texts, dice)
            asks = [
                Ask(answer.id, min(LIMIT, answer.length - answer.done - 1), answer.offers if tokens else None)
                for answer in running
            ]
            start = time.perf_counter()
            decisions = policy.decide(asks)
            score.deciding += time.perf_counter() - start
            follows = frozenset().union(*(policy.follows(number) for number in ids)) - {"lookup"}
        if queued is not None and isinstance(policy, Policy):
            learn(policy, queued, watched, score)
            queued = None
        # The round itself.
        slow = machine.drift(score.seconds) * (1 + machine.noise * abs(noise.gauss(0, 1)))
        depth: dict[str, int] = {}
        many: dict[str, int] = {}
        parts, rows = [], len(running)
        for answer, decision in zip(running, decisions, strict=True):
            accepted = 0
            if decision.arm is not None:
                assert decision.arm not in texts or answer.offers.get(decision.arm, 0) >= decision.depth
                assert 0 < decision.depth < answer.length - answer.done
                accepted = answer.accepted(decision.arm, decision.depth, dice)
                drafter = ARMS[decision.arm].drafter
                depth[drafter] = max(depth.get(drafter, 0), decision.depth)
                many[drafter] = many.get(drafter, 0) + 1
                rows += decision.depth
            if isinstance(policy, Policy) and decision.arm not in texts and policy.needs_watch(answer.id):
                offered = [arm for arm in texts if answer.offers.get(arm)]
                right = {arm: (1 + accepted, answer.accepted(arm, 1 + accepted, dice)) for arm in offered}
                watched.append((answer.id, right))
            parts.append(RoundPart(answer.id, decision, decision.depth, accepted, 1 + accepted))
        now = score.seconds
        times = machine.times(rows, len(running), now)
        drafting = {}
        for drafter, deepest in depth.items():
            if drafter == "lookup":
                continue
            steps = deepest * machine.step[drafter] * (1 + machine.step_row * machine.row * (many[drafter] - 1))
            drafting[drafter] = steps * machine.plain * slow
        times += sum(machine.follow[name] for name in follows) + (machine.wait if waited else 0.0)
        seconds = times * machine.plain * slow + sum(drafting.values())
        score.seconds += seconds
        for answer, part in zip(running, parts, strict=True):
            answer.done += part.tokens
            score.tokens += part.tokens
        ended = [answer for answer in running if answer.done >= answer.length]
        score.decisions.append(tuple(decisions))
        score.followed.append(follows)
        score.sizes.append(len(running))
        if isinstance(policy, Policy):
            apart = {} if machine.overlaps else drafting
            queued = RoundResult(parts, seconds, follows, waited, not (changed or ended) or len(running) == 1, apart)
            if not machine.overlaps:
                learn(policy, queued, watched, score)
                queued = None
        changed = False
        for answer in ended:
            running.remove(answer)
            changed = True
            if isinstance(policy, Policy):
                policy.leave(answer.id)
    return score


def learn(
    policy: Policy, result: RoundResult, watched: list[tuple[int, dict[str, tuple[int, int]]]], score: Score
) -> None:
    start = time.perf_counter()
    policy.learn(result)
    for one in watched:
        policy.watch(*one)
    score.learning += time.perf_counter() - start
    watched.clear()


def replace_answer(answer: Answer, number: int) -> Answer:
    return Answer(answer.length, answer.rates, answer.offered, answer.kind, number)
