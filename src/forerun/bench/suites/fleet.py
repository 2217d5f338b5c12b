"""Which replica answers: the routing code itself over a trace of conversations, with queues in place of replicas.

A replica makes `PLACES` answers at a time, takes so long for a prompt token that it has not cached and for a token of
the answer, and keeps the blocks it used last. The trace is made from a seed (conversations that share a few system
prompts and come back turn by turn), or is a file in Mooncake's form: JSON lines with `timestamp` (milliseconds),
`input_length`, `output_length` and `hash_ids`, one of them for 512 tokens.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.bench.load import parse_clients
from forerun.errors import ForerunError
from forerun.fleet.routing import BLOCK, POLICIES, ByPrefix, Chooser, Route, make_chooser
from forerun.tables import output_console, print_table, unnamed_columns

PLACES = 16  # answers of a replica at a time
READ, SAY = 0.0005, 0.01  # seconds of a prompt token and of an answer's
CACHE = 4000  # blocks that a replica keeps: 256 k tokens
LOAD = 1.2  # of what the replicas could do if nothing were cached
REQUESTS, MOST = 300, 30_000  # of a replica, and of all together
SYSTEMS, SHARED = 12, (8, 40)  # system prompts, and their lengths in blocks
TURNS, TURN, ANSWER = 6, (2, 12), (30, 300)  # of a conversation: how many on average, blocks more, tokens said
MOONCAKE = 512  # tokens of one of its hashes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float  # seconds
    route: Route
    prompt: int  # tokens
    answer: int


@dataclass(slots=True)
class Queue:
    """A replica."""

    running: int = 0
    waiting: deque[tuple[float, Arrival]] = field(default_factory=deque)  # since when
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def read(self, route: Route) -> tuple[int, list[int]]:
        """Blocks of the prompt that it has; and those it forgets for the others."""
        hit = 0
        for block in route.chain:
            if block not in self.cached:
                break
            hit += 1
        for block in reversed(route.chain):  # the end of a prompt is forgotten before its beginning
            self.cached[block] = None
            self.cached.move_to_end(block)
        return hit, [self.cached.popitem(last=False)[0] for _ in range(len(self.cached) - CACHE)]


def add_options(parser: ArgumentParser) -> None:
    """How many, and over what."""
    parser.add_argument("--replicas", default="1,10,100,1000")
    parser.add_argument("--trace", type=Path, help="JSON lines in Mooncake's form")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: Namespace) -> dict[str, Any]:
    """A row for each number of replicas and each way to choose one."""
    results = []
    table = unnamed_columns(6, "replicas, policy: hit rate, waiting p50 and p95, microseconds to choose")
    for count in parse_clients(options.replicas):
        wanted = min(REQUESTS * count, MOST)
        made = conversations(wanted, options.seed) if options.trace is None else recorded(options.trace)
        arrivals = paced(made, count)
        for policy in POLICIES:
            row = simulate(arrivals, count, make_chooser(policy, options.seed)) | {"policy": policy}  # type: ignore[arg-type]
            results.append(row)
            waits = [f"{row[name]:.2f} s" for name in ("waiting_p50", "waiting_p95")]
            table.add_row(str(count), policy, f"{row['hit_rate']:.1%}", *waits, f"{row['choose_us']:.0f}")
    print_table(table, output_console())
    return {"suite": "fleet", "trace": str(options.trace or f"seed {options.seed}"), "results": results}


def conversations(wanted: int, seed: int) -> list[Arrival]:
    """Turns in the order they come; each begins with all that was said before."""
    dice = random.Random(seed)
    names = iter(range(1, 1 << 60))
    systems = [[next(names) for _ in range(dice.randint(*SHARED))] for _ in range(SYSTEMS)]
    weights = [1 / (place + 1) for place in range(SYSTEMS)]  # a few are used by most
    found: list[Arrival] = []
    while len(found) < wanted:
        chain, at = list(dice.choices(systems, weights)[0]), dice.random()
        for _ in range(1 + int(dice.expovariate(1 / TURNS))):
            chain += [next(names) for _ in range(dice.randint(*TURN))]
            found.append(Arrival(at, Route(tuple(chain)), len(chain) * BLOCK, dice.randint(*ANSWER)))
            at += dice.expovariate(1) * 0.01  # of the whole trace: it thinks about what it was told
    return sorted(found, key=lambda one: one.at)[:wanted]


def recorded(file: Path) -> list[Arrival]:
    """A trace of others."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [
            Arrival(one["timestamp"] / 1000, Route(tuple(one["hash_ids"])), one["input_length"], one["output_length"])
            for one in lines
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForerunError(f"{file} is no trace in Mooncake's form: {error}") from error
    if not found:
        raise ForerunError(f"{file} has no requests")
    return sorted(found, key=lambda one: one.at)


def paced(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """The same, as fast as so many replicas are to be kept busy."""
    work = sum(one.prompt * READ + one.answer * SAY for one in arrivals)
    first, last = arrivals[0].at, arrivals[-1].at
    factor = work / (LOAD * PLACES * count) / max(last - first, 1e-9)
    return [Arrival((one.at - first) * factor, one.route, one.prompt, one.answer) for one in arrivals]


def simulate(arrivals: Sequence[Arrival], count: int, chooser: Chooser[str]) -> dict[str, Any]:
    """Every request goes where the chooser says, waits for a place, and is served."""
    replicas = {str(number): Queue() for number in range(count)}
    queues: dict[str, int | None] = dict.fromkeys(replicas, 0)
    ends: list[tuple[float, str]] = []
    waits: list[float] = []
    hits = tokens = 0
    choosing = 0.0

    def begin(name: str, now: float, since: float, one: Arrival) -> None:
        nonlocal hits, tokens
        replica = replicas[name]
        hit, forgotten = replica.read(one.route)
        if isinstance(chooser, ByPrefix):
            chooser.prefixes.removed(name, forgotten)  # as the cache's events will tell
        cached = min(one.prompt, hit * one.prompt // max(1, len(one.route.chain)))
        hits, tokens = hits + cached, tokens + one.prompt
        waits.append(now - since)
        replica.running += 1
        heapq.heappush(ends, (now + (one.prompt - cached) * READ + one.answer * SAY, name))

    def end(now: float, name: str) -> None:
        replica = replicas[name]
        replica.running -= 1
        queues[name] = (queues[name] or 0) - 1
        if replica.waiting:
            begin(name, now, *replica.waiting.popleft())

    for one in arrivals:
        while ends and ends[0][0] <= one.at:
            end(*heapq.heappop(ends))
        began = time.perf_counter()
        name = chooser.choose(one.route, queues)
        chooser.sent(one.route, name)
        choosing += time.perf_counter() - began
        queues[name] = (queues[name] or 0) + 1
        if replicas[name].running < PLACES:
            begin(name, one.at, one.at, one)
        else:
            replicas[name].waiting.append((one.at, one))
    while ends:
        end(*heapq.heappop(ends))
    waits.sort()
    return {
        "replicas": count,
        "requests": len(arrivals),
        "hit_rate": hits / tokens,
        "waiting_p50": waits[len(waits) // 2],
        "waiting_p95": waits[int(0.95 * (len(waits) - 1))],
        "choose_us": choosing / len(arrivals) * 1e6,
    }
