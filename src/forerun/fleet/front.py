"""The HTTP side of a fleet: the server's own application around an engine client that calls replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.errors import ForerunError
from forerun.fleet.client import FleetEngine, ReplicaLost, Replicas, session
from forerun.fleet.replica import About, MediaFacts
from forerun.media.parts import Kind, MediaPart, MediaPrompt
from forerun.serve.app import create_app
from forerun.serve.errors import try_later
from forerun.serve.metrics import Metrics
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.readings import Readings
from forerun.serve.settings import ServeSettings

log = logging.getLogger("forerun")
Found = TypeVar("Found")

LOOK = 1.0  # seconds between two looks at the replicas
SESSION_HEADERS = (b"x-session-token", b"x-session-id")
LONGEST_SESSION = 256  # bytes of its name


class WatchedReplicas(Replicas, Protocol):
    """What a front asks of replicas beside answers."""

    async def about(self) -> About:
        """The model, as soon as any replica has it."""
        ...

    async def readings(self) -> Sequence[Readings]:
        """Of every replica that answers in time."""
        ...

    def read_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt | ForerunError:
        """See `Replica.read_media`; it waits, so it is called on a thread."""
        ...

    def count_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int | ForerunError:
        """See `Replica.count_media`."""
        ...


class Front:
    """One application. Start `watch` beside it."""

    def __init__(self, replicas: WatchedReplicas, settings: ServeSettings, name: str, aliases: tuple[str, ...]) -> None:
        self._replicas, self._settings = replicas, settings
        self.engine = FleetEngine(replicas, settings)
        self.models = ModelService(name, self.engine, aliases)
        self.app: FastAPI = create_app(
            self.models, settings, Metrics(self.engine.readings, name, settings.metrics_names)
        )
        self.app.add_middleware(Sessions)
        self.there = asyncio.Event()  # the model is

    async def watch(self) -> None:
        """Take in the model when it is there; then look at the replicas until it is cancelled."""
        while True:
            try:
                if self.engine.fingerprint is None:
                    self._take_in(await self._replicas.about())
                    log.info("ready: %s", self.models.name)
                self.engine.latest = await self._replicas.readings()
            except ReplicaLost as error:
                log.warning("no replica answers: %s", error)
            except Exception:
                log.exception("looking at the replicas failed")
            await asyncio.sleep(LOOK)

    def _take_in(self, about: About) -> None:
        loaded = LoadedModel(
            tokenizer=about.tokenizer,
            context=about.context,
            vocab=about.vocab,
            stop_ids=about.stop_ids,
            generation_defaults=about.generation_defaults,
            about=about.facts,
            tool_parser=self._settings.tool_parser,
            reasoning_parser=self._settings.reasoning_parser,
            media=None if about.media is None else RemoteMedia(self._replicas, about.media),
        )
        self.models.ready(loaded)
        self.engine.fingerprint = about.fingerprint
        self.there.set()


class RemoteMedia:
    """A `MediaReader` whose towers are on the replicas."""

    def __init__(self, replicas: WatchedReplicas, facts: MediaFacts) -> None:
        self._replicas = replicas
        self.kinds: frozenset[Kind] = facts.kinds
        self.placeholders: Mapping[int, Kind] = facts.placeholders
        self.weight_bytes = facts.weight_bytes

    def read(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        """See `MediaReader`."""
        return _reached(lambda: self._replicas.read_media(ids, parts))

    def count(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int:
        """See `MediaReader`."""
        return _reached(lambda: self._replicas.count_media(ids, parts))


def _reached(call: Callable[[], Found | ForerunError]) -> Found:
    """Once more where a replica was lost; what is wrong with the media is raised."""
    try:
        found = call()
    except ReplicaLost:
        try:
            found = call()
        except ReplicaLost as lost:
            message = "the replica that read the media was lost: try again"
            raise try_later(503, message, "replica_lost", 1) from lost
    if isinstance(found, ForerunError):
        raise found
    return found


class Sessions:
    """ASGI middleware: what the client calls its conversation. Requests of one go to the replica that knows it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        sent = next((headers[name] for name in SESSION_HEADERS if name in headers), b"")
        token = session.set(sent[:LONGEST_SESSION].decode("latin-1"))
        try:
            await self._app(scope, receive, send)
        finally:
            session.reset(token)
