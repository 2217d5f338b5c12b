"""One tenant cannot learn what another asked: neither from what is counted, nor from the time to the first token."""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass

import pytest
from engines import VOCAB
from test_prefix_server import COMPLETIONS, Served, served

from forerun.serve import generation

__all__ = ["served"]  # a fixture
TOKENS = 500  # of a prompt: where it is found, all but a page of it need not be read
TIMES = 24  # prompts of each kind
SURE = 4.0  # deviations: chance alone exceeds them once in thirty thousand runs
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tenant sees of one request."""

    seconds: float  # to the first token
    cached: int


def ask(served: Served, prompt: list[int], headers: dict[str, str], salt: str | None = None) -> Seen:
    """A streamed answer of one token."""
    body = {"prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    sent = json.dumps(body | ({} if salt is None else {"cache_salt": salt}))
    connection = http.client.HTTPConnection(served.address.removeprefix("http://"), timeout=20)
    try:
        began = time.perf_counter()
        connection.request("POST", COMPLETIONS, sent, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        assert response.status == 200
        while not (line := response.readline()).startswith(b"data: {"):
            assert line, "the answer ended before its first token"
        seconds = time.perf_counter() - began
        last = [json.loads(line[6:]) for line in response.read().splitlines() if line.startswith(b"data: {")][-1]
    finally:
        connection.close()
    return Seen(seconds, last["usage"]["prompt_tokens_details"]["cached_tokens"])


def deviation(one: list[float], other: list[float]) -> float:
    """By how many standard deviations the ranks of both differ from those of the same kind of numbers (Mann and
    Whitney). Ranks do not care how far off a request was that a busy machine held up.
    """
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other]
    count, both = len(pairs), len(one) + len(other)
    return (sum(pairs) - count / 2) / (count * (both + 1) / 12) ** 0.5


@dataclass(frozen=True, slots=True)
class Spied:
    """What Bob sees of prompts that Alice has asked, and of prompts that nobody has."""

    asked: list[Seen]
    fresh: list[Seen]
    read: list[int]  # rows that were computed for each of his requests

    @property
    def deviation(self) -> float:
        """Above 0: what she has asked comes sooner."""
        return deviation([one.seconds for one in self.fresh], [one.seconds for one in self.asked])


def spy(served: Served, hers: dict[str, str], salt: str | None, his: dict[str, str], other: str | None) -> Spied:
    """Bob asks what Alice has just asked, and what she has not, in random order. She asks something each time, so
    that the server has done the same just before.
    """
    dice, found = random.Random(7), Spied([], [], [])
    for _ in range(2 * TIMES):
        prompt, another = ([dice.randrange(4, VOCAB) for _ in range(TOKENS)] for _ in range(2))
        steal = len(found.asked) < TIMES and (len(found.fresh) == TIMES or dice.random() < 0.5)
        ask(served, prompt if steal else another, hers, salt)
        (found.asked if steal else found.fresh).append(ask(served, prompt, his, other))
        sequence = served.seen[-1]
        found.read.append(sequence.prompt_length - sequence.counters.cached)
    return found


@pytest.mark.parametrize("apart", ["keys", "salts"])
def test_neither_counts_nor_time_tell_what_another_asked(served: Served, apart: str) -> None:
    told = spy(served, ALICE, None, BOB, None) if apart == "keys" else spy(served, {}, "alice", {}, "bob")
    assert not any(one.cached for one in (*told.asked, *told.fresh))
    assert set(told.read) == {TOKENS}, "something of a prompt was not computed anew"
    assert abs(told.deviation) < SURE


def test_shared_prompts_would_have_been_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without salts the time alone says what was asked."""
    monkeypatch.setattr(generation, "callers_salt", lambda _: "")
    told = spy(served, ALICE, "alice", BOB, "bob")
    assert all(one.cached for one in told.asked) and not any(one.cached for one in told.fresh)
    assert told.deviation > SURE
