"""Replicas on a Ray cluster of this machine: the same answers as one engine, whatever happens to them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serve_fakes import Reply, call, live, until
from test_serve_streams import leave
from tiny import tiny_model

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'forerun[fleet]'")

from fleets import LOADING, STEP, SleepingReplica, kill, plan, ray_cluster, replica_processes, run, running
from test_serve_engine import (  # noqa: F401 - the server's own tests, against the fleet's address
    test_a_storm_of_mixed_requests_gets_what_each_gets_alone,
    test_a_text_is_rated_as_it_would_be_generated,
    test_drafts_and_streams_change_nothing,
    test_drafts_were_made,
    test_forms_of_answers,
    test_forms_that_cannot_be_are_refused,
    test_tools_that_must_be_called_are_called,
)

import forerun
from forerun.fleet.front import LOOK
from forerun.fleet.routing import chain_of
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

CLIENTS = 32
FLAGS = ("--device", "cpu", "--dtype", "float32", "--quantize", "none", "--max-context", "1500", "--gpus", "0")
LONG = 60.0  # seconds after which a client hangs
TEXT = "the cat and the dog and the cat and the dog and"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("fleet") / "tiny", "llama", num_hidden_layers=1, max_position_embeddings=1500
    )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ray_cluster() as port:
        yield port


@pytest.fixture(scope="module")
def address(port: int, folder: Path) -> str:
    """A fleet of two, as a user deploys it. Tests that change it leave one that answers the same."""
    ran = forerun_fleet(str(folder), "--replicas", "2", "--port", str(port), "--metrics-names", "forerun,vllm", *FLAGS)
    assert ran.returncode == 0, ran.stderr
    assert f"serving tiny at http://127.0.0.1:{port}/v1" in ran.stdout and "forerun fleet stop" in ran.stdout
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[str]:
    """One engine, no fleet."""
    model = forerun.load(folder, **LOADING)
    local = LocalEngine(ServeSettings())
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, ServeSettings()))
    with live(create_app(service, ServeSettings())) as address:
        yield address


def forerun_fleet(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, on the cluster of this process."""
    import ray

    where = ["--address", ray.get_runtime_context().gcs_address]
    command = [sys.executable, "-c", "from forerun.cli.main import run; run()", "fleet", *arguments, *where]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_command_line_tells_how_it_is(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = forerun_fleet("status", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["status"] == "RUNNING" and found["deployments"]["engine"]["replicas"] == {"RUNNING": 2}
    assert "2 running" in forerun_fleet("status").stdout


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Every dialect, sampled and not, with forms, tools, stops, log probabilities and several choices."""
    turn = [{"role": "user", "content": TEXT}]
    tool = {"type": "function", "function": {"name": "say", "parameters": {
        "type": "object", "properties": {"word": {"enum": ["hi", "bye"]}}, "required": ["word"]}}}  # fmt: skip
    chat: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 3},
        {"temperature": 1, "seed": 8, "stop": ["e", "th"]},
        {"temperature": 1, "seed": 8, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 1, "seed": 3, "response_format": {"type": "json_object"}},
        {"temperature": 1, "seed": 4, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 9},
        {"temperature": 0, "speculative": "off"},
    ]
    texts: list[dict[str, Any]] = [
        {"prompt": [TEXT, "a"], "seed": 1, "n": 2, "logprobs": 2},
        {"prompt": [5, 6, 7, 8], "temperature": 0, "echo": True, "logprobs": 1},
        {"prompt": TEXT, "seed": 2, "guided_regex": "[ab]{3}-[0-9]{2}"},
    ]
    return [
        *(("/v1/chat/completions", {"messages": turn, "max_tokens": 24, **more}) for more in chat),
        *(("/v1/completions", {"max_tokens": 12, **more}) for more in texts),
        (
            "/inference/v1/generate",
            {
                "token_ids": [5, 6, 7] * 9,
                "sampling_params": {"max_tokens": 20, "seed": 5, "n": 2, "logprobs": 1, "speculative": "lookup"},
            },
        ),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 20, "temperature": 0, "top_logprobs": 1}),
        (
            "/v1/messages",
            {"model": "tiny", "messages": turn, "max_tokens": 20, "temperature": 0, "stop_sequences": ["e"]},
        ),
    ]


PASSING = {  # what differs from answer to answer: names, the clock, what the clock decides, and what was cached
    *("id", "created", "created_at", "completed_at", "model", "timings", "metrics", "forerun", "item_id", "call_id"),
    *("response_id", "request_id", "obfuscation"),
    *("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
}


def lasting(found: Any) -> Any:
    """All else."""
    if isinstance(found, dict):
        if "cache_read_input_tokens" in found:  # Anthropic's clients expect those that were cached to be counted apart
            found = {**found, "input_tokens": found["input_tokens"] + found["cache_read_input_tokens"]}
        return {name: lasting(value) for name, value in found.items() if name not in PASSING}
    return [lasting(one) for one in found] if isinstance(found, list) else found


def streamed(text: str) -> Any:
    """What a stream says in the end, however rounds cut it: its last events, and all its texts together."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said: Counter[Any] = Counter()
    texts: dict[Any, str] = {}
    for event in events:
        for choice in event.get("choices") or ():
            key = choice["index"]
            texts[key] = texts.get(key, "") + str(choice.get("text") or choice.get("delta", {}).get("content") or "")
            texts[key] += "".join(f"{token} " for token in choice.get("token_ids", ()))
            if choice["finish_reason"] is not None:
                said[key, choice["finish_reason"], str(choice["stop_reason"])] += 1
        if isinstance(event.get("delta"), str | dict):
            delta = event["delta"]
            part = delta if isinstance(delta, str) else delta.get("text") or delta.get("stop_reason") or ""
            texts[event["type"]] = texts.get(event["type"], "") + part
    return texts, said


def same(one: str, other: str) -> None:
    for path, body in requests():
        first, second = call(one, path, body), call(other, path, body)
        assert first.status == second.status == 200, (body, first.text, second.text)
        assert lasting(first.json) == lasting(second.json), body
        streams = [call(each, path, body | {"stream": True}).text for each in (one, other)]
        assert streamed(streams[0]) == streamed(streams[1]) != ({}, Counter()), body


def test_two_replicas_answer_as_one_engine_does(address: str, single: str) -> None:
    same(address, single)


def test_official_clients(address: str, single: str) -> None:
    found = []
    for each in (address, single):
        client = openai.OpenAI(base_url=f"{each}/v1", api_key="none", max_retries=0)
        claude = anthropic.Anthropic(base_url=each, api_key="none", max_retries=0)
        turns: Any = [{"role": "user", "content": TEXT}]
        asked: Any = {"model": "tiny", "messages": turns, "max_tokens": 20, "temperature": 0}
        greedy: Any = {"temperature": 0}
        with claude.messages.stream(model="tiny", messages=turns, max_tokens=20, extra_body=greedy) as stream:
            message = stream.get_final_message()
        with client.responses.stream(model="tiny", input=TEXT, max_output_tokens=20, temperature=0) as responses:
            response = responses.until_done().get_final_response()
        found.append((
            client.chat.completions.create(**asked).choices[0].message.content,
            "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **asked)),
            client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, temperature=0).choices[0].text,
            client.models.list().data[0].object,
            message.content[0].text,
            response.output_text,
        ))  # fmt: skip
    assert found[0] == found[1]
    assert len(found[0][0]) > 5


def test_errors_are_the_servers_own(address: str, single: str) -> None:
    turn = {"role": "user", "content": "a"}
    wrong: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [turn], "n": 100}),
        ("/v1/chat/completions", {"messages": [{**turn, "content": "a " * 5000}]}),
        ("/v1/chat/completions", {"messages": [turn], "speculative": "mtp"}),
        ("/v1/completions", {"prompt": [100_000]}),
        ("/v1/messages", {"messages": [turn]}),
        ("/nowhere", {}),
    ]
    for path, body in wrong:
        first, second = call(address, path, body), call(single, path, body)
        assert (first.status, lasting(first.json)) == (second.status, lasting(second.json))
        assert first.status in (400, 404)


def test_answers_keep_the_clients_own_id(address: str) -> None:
    assert call(address, "/v1/models", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"


def test_metrics_of_all_replicas_add_up(address: str) -> None:
    def read(name: str) -> float:
        lines = call(address, "/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name + "{")))

    time.sleep(3 * LOOK)  # readings are a moment old
    assert read("vllm:num_requests_running") == read("vllm:kv_cache_usage_perc") == 0
    before = read("vllm:generation_tokens_total")
    ask = partial(call, address, "/v1/completions", {"prompt": "a", "max_tokens": 10, "ignore_eos": True, "seed": 1})
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: ask(), range(16)))
    until(lambda: read("vllm:generation_tokens_total") == before + 160)
    assert read("forerun:generation_tokens_total") == read("vllm:generation_tokens_total")
    blocks = {line for line in call(address, "/metrics").text.splitlines() if "cache_config_info{" in line}
    assert len(blocks) == 2 and all('block_size="64"' in line for line in blocks)


def test_clients_that_leave_free_the_replica(address: str) -> None:
    class Always:
        running = 1

    def go(number: int) -> None:
        body = {"prompt": "a", "max_tokens": 1200, "ignore_eos": True, "stream": number % 2 == 0, "n": 1 + number % 2}
        leave(address, body, "/v1/completions", b"data" if number % 4 == 0 else b"", Always())  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(go, range(16)))
    state = partial(call, address, "/stats")
    until(lambda: (state().json["running"], state().json["waiting"], state().json["cache_usage"]) == (0, 0, 0), 20)


def test_the_hop_costs_little(address: str, single: str) -> None:
    """What a token more takes through a fleet, beside one engine; printed, with a bound that only a blunder breaks."""
    took = {}
    for name, each in (("fleet", address), ("single", single)):
        best = {}
        for tokens in (10, 310):
            body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "seed": 1, "speculative": "off"}
            times = []
            for _ in range(3):
                began = time.perf_counter()
                assert call(each, "/v1/completions", body).status == 200
                times.append(time.perf_counter() - began)
            best[tokens] = min(times)
        took[name] = (best[310] - best[10]) / 300 * 1e3
    print({name: f"{value:.3f} ms a token" for name, value in took.items()})


class Load:
    """Clients that ask in turns until the block ends; each answer is checked, and none may take for ever."""

    def __init__(self, address: str, expected: Callable[[int], Any], clients: int) -> None:
        self._address, self._expected, self._clients = address, expected, clients
        self.replies: list[tuple[float, int, Reply]] = []
        self._ending = threading.Event()

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(self._clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _ask(self, client: int) -> None:
        number = client
        end = time.monotonic() + LONG
        while not self._ending.is_set() and time.monotonic() < end:
            reply = call(self._address, *body_of(number))
            self.replies.append((time.monotonic(), number, reply))
            number += self._clients

    def check(self) -> tuple[int, int]:
        """Every reply is the right answer, or one clear error. Gives how many there were of both."""
        right = wrong = 0
        for _, number, reply in self.replies:
            if body_of(number)[1].get("stream"):
                failed = '"error"' in reply.text
                assert failed or streamed(reply.text) == streamed(self._expected(number).text)
                assert reply.text.count('"error"') == failed, reply.text
            else:
                failed = reply.status != 200
                assert failed or lasting(reply.json) == lasting(self._expected(number).json)
            if failed:
                assert "was lost" in reply.text or reply.status in (429, 503), reply.text
            right, wrong = right + (not failed), wrong + failed
        return right, wrong


KINDS = 16


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    kind = number % KINDS
    body = {"prompt": f"{TEXT} {kind}", "max_tokens": 200, "ignore_eos": True, "seed": kind, "stream": kind % 2 == 0}
    return "/v1/completions", body


@pytest.fixture(scope="module")
def expected(single: str) -> Callable[[int], Reply]:
    replies = [call(single, *body_of(kind)) for kind in range(KINDS)]
    return lambda number: replies[number % KINDS]


def test_a_replica_is_killed_under_load(address: str, single: str, expected: Callable[[int], Reply]) -> None:
    """No hang; every request ends with its answer or one clear error; service goes on; the replica comes back."""
    until(lambda: running(2), 30)
    victims = replica_processes()
    assert len(victims) == 2
    with Load(address, expected, CLIENTS) as load:
        until(lambda: len(load.replies) > CLIENTS, 30)
        killed = time.monotonic()
        kill(victims[0])
        until(lambda: sum(when > killed + 1 for when, _, _ in load.replies) > CLIENTS, 30)
        # Serve calls the dead one running until it has asked after its health.
        until(lambda: len(replica_processes()) == 2 and victims[0] not in replica_processes() and running(2), 60)
        back = len(load.replies)
        until(lambda: len(load.replies) > back + CLIENTS, 30)
    right, wrong = load.check()
    print(f"killed: {right} answers, {wrong} errors")
    assert right > 3 * CLIENTS and wrong <= CLIENTS
    assert len(replica_processes()) == 2 and victims[0] not in replica_processes()


def test_a_rolling_update_loses_nothing(port: int, address: str, folder: Path, expected: Any, single: str) -> None:
    """Two replicas and the front are replaced, and two more come, while clients ask."""
    before = replica_processes()
    with Load(address, expected, 8) as load:
        until(lambda: len(load.replies) > 8, 30)
        run(plan(folder, port, replicas=4, metrics_names=("forerun", "vllm"), max_choices=8))
        until(lambda: running(4) and not set(before) & set(replica_processes()), 90)
        after = len(load.replies)
        until(lambda: len(load.replies) > after + 8, 90)
    right, wrong = load.check()
    print(f"rolled: {right} answers, {wrong} errors")
    assert wrong == 0 and right > 32
    assert call(address, "/v1/completions", {"prompt": "a", "n": 9}).status == 400, "the front is the new one"
    same(address, single)  # four of them


def test_affinity_of_sessions_and_prompts(address: str) -> None:
    """Requests of a session, or with the same long beginning, are answered by one replica."""
    import ray
    from ray import serve

    assert ray.is_initialized()
    handle = serve.get_deployment_handle("engine", "forerun")

    def prompts() -> Counter[int]:
        readings = handle.broadcast("readings").results(timeout_s=10)
        return Counter({place: one.totals.prompt_tokens for place, one in enumerate(readings)})

    def ask(text: str, **headers: str) -> None:
        body = {"prompt": text, "max_tokens": 1, "ignore_eos": True}
        assert call(address, "/v1/completions", body, headers=headers).status == 200

    for text, headers in (("x", {"x-session-token": "mine"}), ("the long beginning of a prompt " * 6, {})):
        before = prompts()
        for turn in range(12):
            ask(f"{text} {turn}", **headers)
        assert len(prompts() - before) == 1, "one replica read them all"
    before = prompts()
    for turn in range(24):
        ask("x", **{"x-session-token": str(turn)})
    assert len(prompts() - before) >= 3, "and sessions are spread"


def test_routers_hear_what_caches_hold(address: str) -> None:
    """A handle in this process has a router of its own, and nothing was sent through it."""
    from ray import serve

    handle = serve.get_deployment_handle("engine", "forerun")
    handle.readings.remote().result(timeout_s=10)
    prefixes = handle._router._asyncio_router.request_router._chooser.prefixes
    tokens = [number % 50 + 10 for number in range(200)]
    assert call(address, "/v1/completions", {"prompt": tokens, "max_tokens": 1}).status == 200
    until(lambda: prefixes.longest(chain_of(tokens)[-1:], prefixes._latest), 20)
    (holder,) = prefixes.longest(chain_of(tokens), prefixes._latest)
    assert set(chain_of(tokens)) <= prefixes._told(holder)


@pytest.mark.long
def test_another_model_takes_over_under_load(port: int, address: str, tmp_path: Path, expected: Any) -> None:
    """One with the same weights and another template. Some have the old one for a while, and no request meets those."""
    other = tiny_model(tmp_path / "other", "llama", num_hidden_layers=1, max_position_embeddings=1500)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with Load(address, expected, 8) as load:
        until(lambda: len(load.replies) > 8, 30)
        run(plan(other, port, replicas=4, metrics_names=("forerun", "vllm")))
        until(lambda: running(4), 90)
        after = len(load.replies)
        until(lambda: len(load.replies) > after + 8, 90)
    right, wrong = load.check()
    print(f"another model: {right} answers, {wrong} errors")
    assert wrong == 0 and right > 32
    assert call(address, "/props").json["chat_template"] == "{{ messages[0].content }}"


ANSWERS, TOKENS, PLACES = 80, 8, 4


@pytest.mark.long
def test_throughput_grows_with_replicas(port: int, address: str, folder: Path) -> None:
    """Of engines whose rounds take a while and no processor: 1.9 times with two replicas, 3.7 times with four."""
    rates = {}
    for count in (1, 2, 4):
        found = run(plan(folder, port, count, max_running=PLACES, page=False), SleepingReplica)
        until(lambda: running(count), 90)  # noqa: B023 - it is called at once
        bodies = [{"prompt": f"{n}", "max_tokens": TOKENS, "ignore_eos": True, "seed": n} for n in range(ANSWERS)]
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(lambda body: call(found, "/v1/completions", body), bodies[:CLIENTS]))  # noqa: B023
            began = time.perf_counter()
            replies = list(threads.map(lambda body: call(found, "/v1/completions", body), bodies))  # noqa: B023
            rates[count] = ANSWERS * TOKENS / (time.perf_counter() - began)
        assert all(reply.json["usage"]["completion_tokens"] == TOKENS for reply in replies)
    print({count: round(rate) for count, rate in rates.items()}, "tokens/s;", f"at most {PLACES / STEP:.0f} each")
    assert rates[2] >= 1.9 * rates[1] and rates[4] >= 3.7 * rates[1], rates


@pytest.mark.long
def test_more_replicas_come_while_requests_wait(port: int, address: str, folder: Path) -> None:
    more = {"max_replicas": 2, "target_requests": 2}
    assert forerun_fleet("stop").returncode == 0  # those that are there would stay for a while
    found = run(plan(folder, port, 1, more, max_running=PLACES, page=False), SleepingReplica)
    until(lambda: running(1), 90)
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
    ended = threading.Event()

    def ask(_: int) -> None:
        while not ended.is_set():
            assert call(found, "/v1/completions", body).status == 200

    with ThreadPoolExecutor(8) as threads:
        asking = threads.map(ask, range(8))
        try:
            until(lambda: running(2), 60)
        finally:
            ended.set()
        list(asking)


def test_a_fleet_is_stopped(address: str) -> None:
    assert forerun_fleet("stop").returncode == 0
    until(lambda: not replica_processes(), 30)
    for words in (["status"], ["stop"]):
        gone = forerun_fleet(*words)
        assert gone.returncode == 2 and "no fleet runs on this cluster" in gone.stderr


@pytest.mark.long
def test_a_fleet_on_a_machine_without_a_cluster(tmp_path: Path, folder: Path) -> None:
    """It brings its own, which ends with the command; a model that is not there is one line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "import sys; from forerun.cli.main import run; run()"
    command = [sys.executable, "-c", code, "fleet", "--port", str(port), "--address", "local", *FLAGS]
    gone = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=200, check=False)
    assert gone.returncode == 2 and "none" in gone.stderr.splitlines()[-1]
    told = tmp_path / "told"
    with told.open("w") as out:
        process = subprocess.Popen([*command, str(folder)], stdout=out, stderr=subprocess.DEVNULL)
    try:
        until(lambda: "ctrl-c ends it" in told.read_text(), 120)
        assert call(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
