"""A front with its application, in front of a replica in this process: media, sessions, and what it watches."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from media_files import encoded, picture
from seeing import seeing_gemma
from serve_fakes import call, live, until

import forerun
from forerun.errors import ForerunError
from forerun.fleet.client import ReplicaLost
from forerun.fleet.front import Front
from forerun.fleet.replica import About, Replica
from forerun.fleet.routing import Route
from forerun.fleet.wire import Item
from forerun.media.parts import MediaPart, MediaPrompt
from forerun.serve.app import create_app
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.readings import Readings
from forerun.serve.settings import ServeSettings

PICTURE = encoded(picture(seed=1))


class Watched:
    """`WatchedReplicas` around one in this process. `lost`: so many calls about media find it gone."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.lost, self.routes = replica, 0, list[Route]()

    async def answer(self, data: bytes, fingerprint: str, route: Route) -> AsyncGenerator[Item, None]:
        self.routes.append(route)
        async for item in self.replica.answer(data, fingerprint):
            yield item

    async def about(self) -> About:
        return self.replica.about

    async def readings(self) -> Sequence[Readings]:
        return [self.replica.readings()]

    def read_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt | ForerunError:
        return self._called(self.replica.read_media(ids, parts))

    def count_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int | ForerunError:
        return self._called(self.replica.count_media(ids, parts))

    def _called(self, work: Any) -> Any:
        self.lost -= 1
        if self.lost >= 0:
            work.close()
            raise ReplicaLost("killed")
        return asyncio.run(work)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder: Path = seeing_gemma(tmp_path_factory.mktemp("gemma"))
    replica = Replica(ServeSettings())
    asyncio.run(replica.load(lambda: forerun.load(str(folder), device="cpu", dtype="float32", max_context=600)))
    return Watched(replica)


@pytest.fixture(scope="module")
def address(watched: Watched) -> Iterator[str]:
    front = Front(watched, ServeSettings(), "tiny", ())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    with live(front.app) as address:
        assert call(address, "/health").status == 503, "nobody has told it of the model yet"
        assert call(address, "/v1/completions", {"prompt": "a"}).status == 503
        thread.start()
        watching = asyncio.run_coroutine_threadsafe(front.watch(), loop)
        until(lambda: call(address, "/health").status == 200)
        yield address
        watching.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()  # it has ended by then
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


@pytest.fixture(scope="module")
def single(watched: Watched) -> Iterator[str]:
    """The same engine without a front."""
    engine = watched.replica.engine
    assert engine.model is not None
    with live(
        create_app(ModelService("tiny", engine, loaded=loaded_model(engine.model, ServeSettings())), ServeSettings())
    ) as it:
        yield it


def shown(data: bytes = PICTURE) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 12, "seed": 3, "temperature": 0.8}


def test_pictures_are_seen_by_a_replica(address: str, single: str) -> None:
    first, second = (call(each, "/v1/chat/completions", shown()).json for each in (address, single))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    # The replica knows the picture from the first question.
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for each in (first, second)] == [False, True]
    other = call(address, "/v1/chat/completions", shown(encoded(picture(seed=2)))).json
    assert other["choices"] != first["choices"]
    counts = [call(each, "/v1/chat/completions/input_tokens", shown()).json for each in (address, single)]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] == first["usage"]["prompt_tokens"]
    assert call(address, "/props").json["modalities"] == call(single, "/props").json["modalities"]


def test_pictures_that_are_none_are_refused_alike(address: str, single: str) -> None:
    long = shown()
    long["messages"][0]["content"] = long["messages"][0]["content"][:1] * 30
    for body in (shown(b"nothing"), shown(PICTURE[:60]), long):
        first, second = (call(each, "/v1/chat/completions", body) for each in (address, single))
        assert first.status == second.status == 400
        assert first.error == second.error


def test_a_replica_may_be_lost_while_it_looks(address: str, watched: Watched) -> None:
    watched.lost = 1
    assert call(address, "/v1/chat/completions", shown()).status == 200
    watched.lost = 2
    reply = call(address, "/v1/chat/completions", shown())
    watched.lost = 0
    assert reply.status == 503 and "was lost" in reply.error["message"]


def test_a_session_is_part_of_the_route(address: str, watched: Watched) -> None:
    text = "the same long beginning of a prompt, word for word " * 4
    for headers in ({"x-session-token": "mine"}, {"X-Session-Id": "yours"}, {}):
        body = {"prompt": text, "max_tokens": 1}
        assert call(address, "/v1/completions", body, headers=headers).status == 200
    one, other, none = watched.routes[-3:]
    assert (one.session, other.session, none.session) == ("mine", "yours", "")
    assert one.chain == other.chain == none.chain and len(one.chain) >= 1
    assert (one.home, none.home) == ("mine", str(one.chain[0]))


def test_readings_come_with_the_watch(address: str) -> None:
    until(lambda: "forerun:generation_tokens_total" in call(address, "/metrics").text)
    until(lambda: call(address, "/stats").json["running"] == 0)
