"""Many mixed clients against the built-in model for minutes: every text right, nothing left behind, memory flat."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.child_server import ChildServer
from forerun.bench.soak_requests import SoakAnswer, SoakRequest, answer, known_arms, make_requests, references
from forerun.errors import ForerunError

REPORT_EVERY = 30.0  # seconds
SETTLED = 60.0  # seconds after which memory should be flat
GROWTH = 0.03  # of the memory then, which is still called flat: allocators round
HANG_UP = 0.15  # of the requests that we do not wait for
IDLE_WITHIN = 20.0  # seconds after the last client
FILLED_WITHIN = 120.0  # seconds to let all clients in
FULL = 0.95  # of the cache: there is no room for more of them
SHOWN = 5  # wrong answers


def add_options(parser: ArgumentParser) -> None:
    """How long and how hard."""
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=60, help="different ones")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)


@dataclass(slots=True)
class SoakTally:
    """What happened so far."""

    right: int = 0
    tokens: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)


class Soak:
    """One run. Clients take random requests from the list until the time is over."""

    def __init__(self, server: ChildServer, options: Namespace, requests: list[SoakRequest]) -> None:
        self._server, self._options, self._requests = server, options, requests
        self._expected: dict[int, SoakAnswer] = {}
        self._arms: list[str] = []
        self.tally, self._began = SoakTally(), 0.0

    async def run(self) -> dict[str, Any]:
        """All of it."""
        self._expected, missing = await references(self._server.address, self._requests)
        print(
            f"{len(self._expected)} reference answers; without: {', '.join(sorted(missing)) or 'nothing'}", flush=True
        )
        self._arms = await known_arms(self._server.address, self._requests[0])
        await self._fill()
        self._began = time.monotonic()
        end = self._began + 60 * self._options.minutes
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            clients = [
                group.create_task(self._client(random.Random(self._options.seed * 1000 + number), end))
                for number in range(self._options.clients)
            ]
            await asyncio.wait(clients)
            watch.cancel()
        idle = await self._wait_until_idle()
        return self._verdict(idle, missing)

    async def _fill(self) -> None:
        """The largest request from all clients at once, and nobody stays for the answer.

        A server touches the pages of its cache when it first needs them, and keeps them: its memory follows the most
        that was ever asked of it. What grows after that is a leak.
        """
        largest = max((self._requests[number] for number in self._expected), key=lambda one: one.room)
        asked = [
            asyncio.ensure_future(answer(self._server.address, largest, "off", True, None))
            for _ in range(self._options.clients)
        ]
        deadline = time.monotonic() + FILLED_WITHIN
        while time.monotonic() < deadline:
            state = await self._server.address.fetch("/stats")
            if state["running"] >= len(asked) or state["cache_usage"] > FULL:
                break
            await asyncio.sleep(0.1)
        print(f"filled: {state['running']} running, cache {100 * state['cache_usage']:.0f} %", flush=True)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self._wait_until_idle()

    async def _client(self, dice: random.Random, end: float) -> None:
        while time.monotonic() < end:
            number = dice.choice(list(self._expected))
            stream, arm = dice.random() < 0.6, dice.choice(self._arms)
            try:
                if dice.random() < HANG_UP:
                    await self._hang_up(number, arm, stream, dice)
                else:
                    await self._compare(number, arm, stream)
            except ForerunError as error:
                self.tally.failed.append(f"{self._requests[number].kind} {arm}: {error}")
                await asyncio.sleep(0.1)

    async def _compare(self, number: int, arm: str, stream: bool) -> None:
        request, expected = self._requests[number], self._expected[number]
        said = await answer(self._server.address, request, arm, stream, None)
        assert said is not None
        if said.choices == expected.choices and said.tokens == expected.tokens:
            self.tally.right += 1
        else:
            how = "streamed" if stream else "whole"
            self.tally.wrong.append(f"request {number} ({request.kind}, {arm}, {how}): {said} and not {expected}")
        self.tally.tokens += said.tokens
        self.tally.kinds[request.kind] += 1

    async def _hang_up(self, number: int, arm: str, stream: bool, dice: random.Random) -> None:
        """After some events of a stream, or some milliseconds of anything."""
        asking = answer(self._server.address, self._requests[number], arm, stream, dice.randint(1, 12))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asking, dice.uniform(0.0, 2.0))
        self.tally.cancelled += 1

    async def _watch(self) -> None:
        """A line every half minute; memory every second."""
        spoken = 0.0
        while True:
            now = time.monotonic() - self._began
            self.tally.memory.append((now, self._server.memory()))
            if now - spoken >= REPORT_EVERY:
                spoken = now
                print(await self._line(now), flush=True)
            await asyncio.sleep(1.0)

    async def _line(self, now: float) -> str:
        tally, state = self.tally, await self._server.address.fetch("/stats")
        return (
            f"{now:5.0f} s: {tally.right} right, {len(tally.wrong)} wrong, {len(tally.failed)} failed, "
            f"{tally.cancelled} hung up, {tally.tokens / now:.0f} tok/s, {tally.memory[-1][1] / 2**20:.0f} MiB, "
            f"{state['running']} running, {state['waiting']} waiting, cache {100 * state['cache_usage']:.0f} %"
        )

    async def _wait_until_idle(self) -> dict[str, Any]:
        deadline = time.monotonic() + IDLE_WITHIN
        while True:
            state: dict[str, Any] = await self._server.address.fetch("/stats")
            if is_idle(state) or time.monotonic() > deadline:
                return state
            await asyncio.sleep(0.2)

    def _verdict(self, state: dict[str, Any], missing: set[str]) -> dict[str, Any]:
        tally = self.tally
        growth = growth_after(tally.memory, SETTLED)
        for line in (tally.wrong + tally.failed)[:SHOWN]:
            print(line[:2000])
        flat = growth is None or growth <= GROWTH
        return {
            "passed": not tally.wrong and not tally.failed and is_idle(state) and flat and tally.right > 0,
            "minutes": self._options.minutes,
            "clients": self._options.clients,
            "right": tally.right,
            "wrong": len(tally.wrong),
            "failed": len(tally.failed),
            "hung_up": tally.cancelled,
            "tokens": tally.tokens,
            "kinds": dict(tally.kinds),
            "kinds_missing": sorted(missing),
            "state": state,
            "memory_mib": [round(held / 2**20) for _, held in tally.memory[:: int(REPORT_EVERY)]],
            "memory_growth_after_first_minute": growth,
        }


def is_idle(state: dict[str, Any]) -> bool:
    """Nobody runs or waits, and no page is held."""
    return bool(state["running"] == state["waiting"] == 0 and state["cache_usage"] == 0)


def growth_after(memory: list[tuple[float, int]], seconds: float) -> float | None:
    """How much more the most of the last tenth is than the most around `seconds`, as a share; None: too short a run."""
    last = memory[-1][0] if memory else 0.0
    if last < 2 * seconds:
        return None
    early = max(held for when, held in memory if seconds / 2 <= when <= seconds)
    late = max(held for when, held in memory if when >= 0.9 * last)
    return late / early - 1


def measure(options: Namespace) -> dict[str, Any]:
    """Start a server, press it, look at what is left."""
    requests = make_requests(options.requests, options.seed)
    with ChildServer(options.model) as server:
        return asyncio.run(Soak(server, options, requests).run())
