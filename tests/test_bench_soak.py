"""The suites that need a server, as far as they run without one: requests, comparisons, the engine's own turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

import forerun
from forerun.bench.compared_server import ComparedServer, run_engine
from forerun.bench.engine_load import EngineTarget
from forerun.bench.load import ClosedLoop, Job, LoadCell, LoadRun, TimedAnswer
from forerun.bench.soak_requests import KINDS, _Streamed, _whole, make_requests
from forerun.bench.suites.http import report_line, result
from forerun.bench.suites.soak import growth_after, is_idle
from forerun.errors import ForerunError


def test_requests_are_of_all_kinds_and_the_same_every_time() -> None:
    requests = make_requests(30, seed=1)
    assert requests == make_requests(30, seed=1) != make_requests(30, seed=2)
    assert {request.kind for request in requests} == set(KINDS)
    assert len({str(request.body) for request in requests}) == 30
    streamed = requests[0].full_body("mtp", True)
    assert streamed["stream"] is True and streamed["speculative"] == "mtp"
    assert "stream" not in requests[0].full_body("off", False)


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None, **more}


def test_streamed_and_whole_answers_are_compared_in_all_they_say() -> None:
    entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]
    calls = [{"function": {"name": "note", "arguments": '{"count": 1}'}}]
    message = {"content": "ab", "reasoning_content": "hm", "tool_calls": calls}
    whole = _whole({"message": message, "finish_reason": "tool_calls", "logprobs": {"content": entries}})
    chunks = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "h"}),
        chunk({"reasoning_content": "m"}),
        chunk({"content": "a"}, logprobs={"content": entries[:1]}),
        chunk({"content": "b"}, logprobs={"content": entries[1:]}),
        chunk({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "note", "arguments": '{"co'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'unt": 1}'}}]}),
        chunk({}) | {"finish_reason": "tool_calls"},
    ]
    streamed = _Streamed()
    for one in chunks:
        streamed.add(one)
    assert streamed.whole() == whole
    shorter = _Streamed()
    for one in chunks[:-2]:
        shorter.add(one)
    assert shorter.whole() != whole


def test_memory_and_idleness() -> None:
    flat = [(float(second), 100) for second in range(200)]
    assert growth_after(flat, 60) == 0
    assert growth_after([(when, 100 + int(when)) for when, _ in flat], 60) == 299 / 160 - 1
    assert growth_after(flat[:100], 60) is None and growth_after([], 60) is None
    assert is_idle({"running": 0, "waiting": 0, "cache_usage": 0.0})
    for busy in ({"running": 1}, {"waiting": 1}, {"cache_usage": 0.01}):
        assert not is_idle({"running": 0, "waiting": 0, "cache_usage": 0.0} | busy)


def test_the_engines_own_turn_gives_the_texts_of_single_requests(tmp_path: Path) -> None:
    model = forerun.load(str(tiny_model(tmp_path / "model", "llama")), max_context=256)
    jobs = [Job(str(n), f"hello {n}", 10 + n, 0.7, n) for n in range(5)]
    target = EngineTarget(model)
    for arm in ("off", "auto"):
        rate, texts = run_engine(target, jobs, 3, arm)
        assert rate > 0
        for job, text in zip(jobs, texts, strict=True):
            alone = forerun.generate(model, job.content, max_tokens=job.max_tokens, temperature=0.7, seed=job.seed)
            assert text == alone.text
    assert model.engine.scheduler.idle


def test_overhead_is_a_share_of_the_engines_rate() -> None:
    cell, plain = LoadCell(ClosedLoop(4), "auto", 0.0), LoadRun([TimedAnswer("a", 95, 0.1, [0.1] * 4, 9, 5)], 2.0)
    for seconds in (95 / 90, 1.0, 95 / 98):
        cell.add(LoadRun(plain.answers, seconds), plain)
    found = result(cell, [100.0, 100.0, 100.0], [0.03], same=True)
    assert found["clients"] == 4 and found["auto_over_off"] == 2.0
    assert abs(found["overhead"] - 0.05) < 1e-9 and "overhead 5.0 %" in report_line(found)
    other = result(cell, [100.0, 100.0, 100.0], [0.03], same=False)
    assert other["overhead"] is None and "texts differ" in report_line(other)


def test_the_engine_of_a_compared_server_refuses_in_one_line(tmp_path: Path) -> None:
    """A prompt that does not fit ended the thread that takes turns, and the suite waited for ever."""
    job = Job("long", "word " * 500, 8, 0.0, 1)
    with ComparedServer(str(tiny_model(tmp_path, "llama"))) as server:
        with pytest.raises(ForerunError, match="the context holds 512"):
            server.engine_turn([job], 1, "off")
        _, texts = server.engine_turn([Job("short", "Hi", 4, 0.0, 1)], 1, "off")
    assert texts[0]
