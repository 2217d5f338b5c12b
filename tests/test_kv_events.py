"""Events of the cache over ZeroMQ, read as public subscribers of vLLM's events do: nothing missing or invented."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from engines import PAGE, decoder
from local_engines import language_model
from serve_fakes import call, live, until
from test_serve_run import free_port
from tiny import tiny_model

from forerun.cache.prefix import AllRemoved, CachedPage, PageRemoved, PageStored
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.serve import kv_events
from forerun.serve.app import create_app
from forerun.serve.kv_events import KvEventPublisher
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings
from forerun.serve.settings_check import check_settings

TOPIC = "kv@10.0.0.7:8000@tiny"


# The public form: each event a list, its name first, fields by their place, those at the end may be missing.
class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Keeps an index of one server's blocks, as routers do."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(address)
        self.socket.subscribe("kv@")
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.batches: list[KVEventBatch] = []
        self.numbers: list[int] = []
        self.topics: set[str] = set()
        self.blocks: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}

    def read(self, seconds: float = 0.3) -> list[Any]:
        """Events that come until there are none for a while."""
        found: list[Any] = []
        while self.socket.poll(round(seconds * 1000)):
            topic, number, payload = self.socket.recv_multipart()
            assert len(number) == 8
            self.topics.add(topic.decode())
            self.numbers.append(int.from_bytes(number, "big"))
            batch = self.decoder.decode(payload)
            assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60 and batch.events
            for event in batch.events:
                self.take(event)
            self.batches.append(batch)
            found += batch.events
        return found

    def take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, BlockStored):
            size, parent = event.block_size, event.parent_block_hash
            assert size * len(event.block_hashes) == len(event.token_ids)
            assert parent is None or parent in self.blocks, "a parent comes before its child"
            for at, name in enumerate(event.block_hashes):
                assert name not in self.blocks
                self.blocks[name] = parent, tuple(event.token_ids[at * size : (at + 1) * size])
                parent = name
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.blocks[name]
        else:
            self.blocks.clear()

    def texts(self) -> set[tuple[int, ...]]:
        """What a request may begin with so that the server knows it."""

        def text(name: int | bytes | None) -> tuple[int, ...]:
            if name is None:
                return ()
            parent, tokens = self.blocks[name]
            return text(parent) + tokens

        return {text(name) for name in self.blocks}

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def joined(publisher: KvEventPublisher, address: str) -> Subscriber:
    """Of a publisher whose subscriber is surely there: a subscription needs a moment to arrive."""
    subscriber = Subscriber(address)
    until(lambda: publisher.hear(AllRemoved()) or subscriber.read(0.05))
    subscriber.read()
    return subscriber


class Served:
    """A real engine behind the server, with room for few pages."""

    def __init__(self, folder: Path, address: str, pages: int) -> None:
        target = decoder(tiny_model(folder, "llama", num_hidden_layers=1), quantize=False)
        self.model: LanguageModel = language_model(target, pages=pages)
        self.publisher = KvEventPublisher(address, TOPIC)
        self.subscriber = joined(self.publisher, address)
        self.local = LocalEngine(ServeSettings(), self.publisher.follow)
        self.local.open(self.model)
        loaded = loaded_model(self.model, ServeSettings())
        self.app = create_app(ModelService("tiny", self.local, loaded=loaded), ServeSettings())

    def ask(self, url: str, prompt: list[int], tokens: int) -> list[int]:
        """The whole text."""
        wish = {"max_tokens": tokens, "seed": 1, "ignore_eos": True}
        reply = call(url, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": wish})
        assert reply.status == 200, reply.text
        return prompt + list(reply.json["choices"][0]["token_ids"])

    def cached(self) -> set[tuple[int, ...]]:
        """As the index itself has it."""

        def text(page: CachedPage | None) -> tuple[int, ...]:
            return () if page is None else text(page.parent) + page.tokens

        return {text(page) for page in self.model.engine.pool.prefix._pages.values()}

    def close(self) -> None:
        asyncio.run(self.local.close())
        self.publisher.close()
        self.subscriber.close()


@pytest.fixture
def served(tmp_path: Path, address: str) -> Iterator[Served]:
    found = Served(tmp_path, address, pages=60)
    yield found
    found.close()


def test_a_subscriber_knows_what_the_cache_holds(served: Served) -> None:
    subscriber = served.subscriber
    with live(served.app) as url:
        text = served.ask(url, list(range(10, 10 + 5 * PAGE + 3)), 2 * PAGE)
        events = subscriber.read()
        full = (len(text) - 1) // PAGE  # the last token has no keys yet
        assert all(isinstance(event, BlockStored) for event in events)
        assert [event.medium for event in events] == ["CPU"] * len(events) and events[0].extra_keys is None
        assert (events[0].block_size, events[0].lora_id, events[0].lora_name) == (PAGE, None, None)
        assert len(events[0].block_hashes) > 1, "pages of one pass are one event"
        assert events[0].parent_block_hash is None
        assert [token for event in events for token in event.token_ids] == text[: full * PAGE]
        assert subscriber.texts() == {tuple(text[: (n + 1) * PAGE]) for n in range(full)} == served.cached()
        again = served.ask(url, [*text[: 3 * PAGE], 7, 8, 9, *range(100, 100 + PAGE)], 1)
        (more,) = subscriber.read()
        assert more.token_ids == again[3 * PAGE : 4 * PAGE], "what is found is not told again"
        assert subscriber.blocks[more.parent_block_hash][1] == tuple(text[2 * PAGE : 3 * PAGE])


def test_what_has_to_go_is_told(served: Served) -> None:
    subscriber = served.subscriber
    with live(served.app) as url:
        for number in range(12):
            served.ask(url, [number + 5, *range(20, 20 + 9 * PAGE)], 3)
        events = subscriber.read()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed and {event.medium for event in removed} == {"CPU"}
    assert 30 < len(subscriber.blocks) <= 60 and subscriber.texts() == served.cached()
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[0] + len(subscriber.numbers)))
    assert subscriber.topics == {TOPIC} and len(subscriber.numbers) > 3


def test_new_weights_clear_everything(served: Served) -> None:
    subscriber, thread = served.subscriber, served.local._thread
    with live(served.app) as url:
        served.ask(url, list(range(10, 40)), 1)
        assert subscriber.read() and subscriber.blocks
        assert thread is not None
        thread.call(lambda: served.model.update_weights({"model.norm.weight": torch.ones(64)})).result(20)
        assert subscriber.read() == [AllBlocksCleared()] and not subscriber.blocks
        served.ask(url, list(range(10, 40)), 1)
        subscriber.read()
    assert subscriber.texts() == served.cached() != set()


def page(number: int, before: int | None = None, **more: Any) -> PageStored:
    return PageStored(b"page %03d" % number, None if before is None else b"page %03d" % before, (number,) * 4, **more)


def test_a_publisher_that_falls_behind_never_lies(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits without end, and what was dropped is not believed to be there."""
    publisher = KvEventPublisher(address, TOPIC)
    subscriber = joined(publisher, address)
    monkeypatch.setattr(kv_events, "MOST_EVENTS", 8)
    monkeypatch.setattr(kv_events, "GATHER", 0.2)
    publisher.hear(page(100))
    assert [type(event) for event in subscriber.read()] == [BlockStored]
    for number in range(20):
        publisher.hear(page(number))
        assert len(publisher._waiting) <= 8
    events = subscriber.read(0.5)
    assert events[0] == AllBlocksCleared() and all(isinstance(event, BlockStored) for event in events[1:])
    assert {tokens[0] for _, tokens in subscriber.blocks.values()} == {15, 16, 17, 18, 19}
    publisher.close()
    subscriber.close()


def test_moves_media_and_forks_keep_apart(address: str) -> None:
    publisher = KvEventPublisher(address, TOPIC)
    publisher._pool = "GPU"
    subscriber = joined(publisher, address)
    heard = [page(1), page(2, 1), page(3, 1), page(4, 3, media=b"\x0a\x0b"), page(5, 4), page(6, 5)]
    heard += [PageRemoved(b"page 006"), page(6, 5, resident=False)]
    heard += [PageRemoved(b"page 006", resident=False), PageRemoved(b"page 005"), PageRemoved(b"page 002")]
    for event in heard:
        publisher.hear(event)
    found = subscriber.read()
    told = [(type(e).__name__, len(getattr(e, "block_hashes", ())), getattr(e, "medium", "")) for e in found]
    assert told == [
        *(("BlockStored", 2, "GPU"), ("BlockStored", 1, "GPU"), ("BlockStored", 1, "GPU"), ("BlockStored", 2, "GPU")),
        *(
            ("BlockRemoved", 1, "GPU"),
            ("BlockStored", 1, "CPU"),
            ("BlockRemoved", 1, "CPU"),
            ("BlockRemoved", 2, "GPU"),
        ),
    ]
    assert [getattr(event, "extra_keys", None) for event in found[:4]] == [None, None, [("0a0b",)], None]
    assert len(subscriber.blocks) == 3
    publisher.close()
    subscriber.close()


def test_an_address_that_is_taken_is_one_line(address: str) -> None:
    publisher = KvEventPublisher(address, TOPIC)
    with pytest.raises(ForerunError, match=f"cannot publish at {address}: .*another port"):
        KvEventPublisher(address, TOPIC)
    publisher.close()


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"kv_events": "5557"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://localhost:5557"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://127.0.0.1:70000"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://1.2.3:5557"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "ipc:///tmp/a"}, "as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://*:5557"}, "all prompts and answers"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "set a key"),
        ({"kv_events": "tcp://[::]:5557"}, "set a key"),
        ({"kv_events_topic": "mine"}, "say where with --kv-events"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, str], about: str) -> None:
    with pytest.raises(ForerunError, match=about) as error:
        check_settings(ServeSettings(**settings))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["127.0.0.1", "[::1]", "*", "0.0.0.0"])
def test_addresses_that_are_taken_as_they_are(where: str) -> None:
    key = None if where in ("127.0.0.1", "[::1]") else "k"
    check_settings(ServeSettings(kv_events=f"tcp://{where}:5557", api_key=key))


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ForerunError, match=r"package zmq: pip install 'forerun\[events\]'"):
        check_settings(ServeSettings(kv_events="tcp://127.0.0.1:5557"))


def test_a_cache_that_keeps_nothing_has_nothing_to_tell(tmp_path: Path, address: str) -> None:
    target = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    publisher = KvEventPublisher(address, TOPIC)
    with pytest.raises(ForerunError, match="leave out --no-prefix-cache"):
        LocalEngine(ServeSettings(), publisher.follow).open(language_model(target, prefix_cache=False))
    publisher.close()


def test_the_command_publishes_from_start_to_end(tmp_path: Path, address: str) -> None:
    """`forerun serve` as a user starts it, with the topic it makes itself."""
    folder, port = tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=1), free_port()
    options = ["--device", "cpu", "--dtype", "float32", "--quantize", "none", "--port", str(port), "--quiet"]
    command = [sys.executable, "-c", "from forerun.cli.main import run; run()", "serve", str(folder), *options]
    refused = subprocess.run(
        [*command, "--kv-events", address, "--no-prefix-cache"], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--no-prefix-cache" in refused.stderr
    subscriber = Subscriber(address)
    process = subprocess.Popen([*command, "--kv-events", address])
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), 60)
        call(url, "/v1/completions", {"prompt": list(range(10, 10 + 150)), "max_tokens": 1})
        subscriber.read(0.5)
        (topic,) = subscriber.topics
        assert topic.startswith("kv@") and topic.endswith("@tiny") and topic.count("@") == 2
        assert tuple(range(10, 10 + 128)) in subscriber.texts(), "pages of a real server have 64 tokens"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        subscriber.close()


def is_ready(url: str) -> bool:
    try:
        return call(url, "/health").status == 200
    except OSError:
        return False
