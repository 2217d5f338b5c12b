"""Settings of the simulated machine: who wins, who loses, alone and in batches, on CPUs and GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from policy_world import Answer, Machine

LOOKUP = {"lookup": 15, "long lookup": 15}
HEAD = {"mtp": 6}


@dataclass
class Setting:
    name: str
    machine: Machine
    answers: Callable[[random.Random, int], list[Answer]]  # with dice, for so many clients
    arms: dict[str, int]
    clients: int
    wins: bool = False  # a fixed arm clearly wins
    short: bool = False


def steady(
    length: int, rates: dict[str, float], count: int = 8, offers: dict[str, float] | None = None
) -> Callable[[random.Random, int], list[Answer]]:
    def make(dice: random.Random, clients: int) -> list[Answer]:
        mine = []
        for _ in range(count * clients):
            shift = {arm: dice.uniform(-0.08, 0.08) for arm in rates}
            mine.append(
                Answer(
                    max(8, round(length * dice.uniform(0.7, 1.3))),
                    lambda arm, done, shift=shift: min(0.98, max(0.0, rates[arm] + shift[arm])),
                    lambda arm, done: (offers or {}).get(arm, 0.0),
                )
            )
        return mine

    return make


def mixed(length: int, count: int = 8) -> Callable[[random.Random, int], list[Answer]]:
    """Half of the answers suit the head, the others do not; some change in the middle."""

    def make(dice: random.Random, clients: int) -> list[Answer]:
        mine = []
        for _ in range(count * clients):
            first, then = dice.choice([(0.75, 0.75), (0.15, 0.15), (0.75, 0.1), (0.1, 0.75)])
            mine.append(
                Answer(
                    length,
                    lambda arm, done, a=first, b=then: a if done < 0.5 else b,
                    kind=dice.choice(["short", "code"]),
                )
            )
        return mine

    return make


def copying(
    length: int, count: int = 8, share: float = 0.5, everyone: float = 1.0
) -> Callable[[random.Random, int], list[Answer]]:
    """Prose, then a copied stretch where a long match is there; now and then a short match that is mostly wrong."""

    def make(dice: random.Random, clients: int) -> list[Answer]:
        mine = []
        for _ in range(count * clients):
            start = dice.uniform(0, 1 - share) if dice.random() < everyone else 2.0

            def rates(arm: str, done: float, start: float = start) -> float:
                inside = start <= done < start + share
                return {"mtp": 0.7, "long lookup": 0.96 if inside else 0.4, "lookup": 0.25}[arm]

            def offered(arm: str, done: float, start: float = start) -> float:
                inside = start <= done < start + share
                return {"long lookup": 0.95 if inside else 0.02, "lookup": 0.0 if inside else 0.3}.get(arm, 0.0)

            mine.append(Answer(length, rates, offered, "given text" if start < 1 else "short"))
        return mine

    return make


GOOD_HEAD = {"step": {"mtp": 0.06}, "follow": {"mtp": 0.02}}
CPU_HEAD = {"step": {"mtp": 0.3}, "follow": {"mtp": 0.05}}
DRAFT_MODEL = {"step": {"model": 0.3}, "follow": {"model": 0.25}}
GPU = {"overlaps": True, "plain": 0.0012, "noise": 0.015}


def busy(seconds: float) -> float:
    """A neighbour comes and goes."""
    return 1.8 if int(seconds / 2.0) % 2 else 1.0


def robbed(seconds: float) -> float:
    """A core is taken now and then: many rows suffer more than few."""
    return 0.25 if int(seconds / 3.0) % 2 else 0.0


SETTINGS = [
    Setting(
        "alone, head wins, GPU", Machine(row=0.01, **GOOD_HEAD, **GPU), steady(200, {"mtp": 0.7}), HEAD, 1, wins=True
    ),
    Setting(
        "alone, head wins, short",
        Machine(row=0.02, **GOOD_HEAD),
        steady(64, {"mtp": 0.7}, 12),
        HEAD,
        1,
        wins=True,
        short=True,
    ),
    Setting("alone, head wins, CPU", Machine(row=0.1, **CPU_HEAD), steady(300, {"mtp": 0.85}), HEAD, 1),
    Setting("alone, head loses, CPU", Machine(row=0.15, **CPU_HEAD), steady(300, {"mtp": 0.35}), HEAD, 1),
    Setting(
        "alone, head loses, short", Machine(row=0.15, **CPU_HEAD), steady(64, {"mtp": 0.3}, 12), HEAD, 1, short=True
    ),
    Setting("alone, head breaks even", Machine(row=0.12, **CPU_HEAD), steady(300, {"mtp": 0.55}), HEAD, 1),
    Setting("alone, model loses", Machine(row=0.1, **DRAFT_MODEL), steady(300, {"model": 0.5}), {"model": 8}, 1),
    Setting("alone, mixed", Machine(row=0.1, step={"mtp": 0.15}, follow={"mtp": 0.03}), mixed(400), HEAD, 1),
    Setting("alone, copying, CPU", Machine(row=0.12, **CPU_HEAD), copying(300), HEAD | LOOKUP, 1),
    Setting("alone, copying, GPU", Machine(row=0.01, wait=0.3, **GOOD_HEAD, **GPU), copying(300), HEAD | LOOKUP, 1),
    Setting("alone, lookup only", Machine(row=0.12), copying(300, share=0.7), LOOKUP, 1),
    Setting(
        "alone, busy neighbour, loses",
        Machine(row=0.15, drift=busy, noise=0.1, **CPU_HEAD),
        steady(400, {"mtp": 0.35}),
        HEAD,
        1,
    ),
    Setting(
        "alone, busy neighbour, wins",
        Machine(row=0.03, drift=busy, noise=0.1, **GOOD_HEAD),
        steady(400, {"mtp": 0.7}),
        HEAD,
        1,
        wins=True,
    ),
    Setting(
        "alone, core stolen",
        Machine(row=0.06, stolen=robbed, step={"mtp": 0.15}, follow={"mtp": 0.03}),
        steady(400, {"mtp": 0.6}),
        HEAD,
        1,
    ),
    Setting("4, head wins, GPU", Machine(row=0.01, **GOOD_HEAD, **GPU), steady(128, {"mtp": 0.7}), HEAD, 4, wins=True),
    Setting("4, head loses, CPU", Machine(row=0.25, **CPU_HEAD), steady(200, {"mtp": 0.4}), HEAD, 4),
    Setting("4, mixed, CPU", Machine(row=0.12, **CPU_HEAD), mixed(300), HEAD, 4),
    Setting("4, copying, GPU", Machine(row=0.01, wait=0.3, **GOOD_HEAD, **GPU), copying(300), HEAD | LOOKUP, 4),
    Setting(
        "16, head wins, GPU", Machine(row=0.01, **GOOD_HEAD, **GPU), steady(128, {"mtp": 0.7}, 6), HEAD, 16, wins=True
    ),
    Setting("16, head loses, CPU", Machine(row=0.4, **CPU_HEAD), steady(128, {"mtp": 0.5}, 6), HEAD, 16),
    Setting("16, short, loses, CPU", Machine(row=0.4, **CPU_HEAD), steady(64, {"mtp": 0.5}, 10), HEAD, 16, short=True),
    Setting(
        "16, one in four copies, GPU", Machine(row=0.01, wait=0.3, **GPU), copying(200, 6, everyone=0.25), LOOKUP, 16
    ),
    Setting(
        "64, head wins, GPU", Machine(row=0.008, **GOOD_HEAD, **GPU), steady(128, {"mtp": 0.7}, 4), HEAD, 64, wins=True
    ),
    Setting("64, head loses, GPU", Machine(row=0.05, **CPU_HEAD, **GPU), steady(128, {"mtp": 0.5}, 4), HEAD, 64),
    Setting("64, near, GPU", Machine(row=0.022, **CPU_HEAD, **GPU), steady(128, {"mtp": 0.6}, 4), HEAD, 64),
    Setting(
        "64, short, loses, GPU", Machine(row=0.05, **CPU_HEAD, **GPU), steady(64, {"mtp": 0.5}, 6), HEAD, 64, short=True
    ),
    Setting(
        "64, lookups do not pay, GPU", Machine(row=0.02, wait=0.3, **GPU), copying(128, 4, everyone=0.0), LOOKUP, 64
    ),
]
