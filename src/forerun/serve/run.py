"""Runs the server: listens at once, loads the model beside that, ends in good order.

The first SIGTERM or SIGINT lets answers finish for a while and refuses new ones; a second one ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from forerun.serve.connection import Connection
from forerun.serve.settings import ServeSettings
from forerun.serve.settings_check import check_settings

if TYPE_CHECKING:
    from forerun.language_model import LanguageModel

log = logging.getLogger("forerun")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HEADER_BYTES = 64 << 10
IDLE = 75  # seconds that a connection is kept for another request
FLUSH = 2  # seconds for the last bytes of answers that were stopped


class Drainable(Protocol):
    """An engine that can come to an end."""

    async def drain(self, timeout: float) -> None:
        """Refuse what is new, let the others finish for so long, stop the rest."""
        ...


class Server(uvicorn.Server):
    """uvicorn, but signals are ours: it would cut off streams at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them alone."""
        yield


async def serve(
    app: Any, engine: Drainable, settings: ServeSettings, loading: Coroutine[Any, Any, None] | None = None
) -> None:
    """Serve until a signal comes or loading fails, which is raised."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",  # at the end of it the application ends its threads
        ws="none",
        http=Connection,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=FLUSH,
        limit_concurrency=4 * (settings.max_running + settings.max_queue) + 256,
    )
    server = Server(config)
    ending: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await engine.drain(settings.drain_timeout)
        server.should_exit = True

    def end() -> None:
        if ending:
            log.warning("a second signal: ending at once")
            server.should_exit = server.force_exit = True
        else:
            log.info("finishing answers for at most %g seconds; a second signal ends at once", settings.drain_timeout)
            ending.append(asyncio.ensure_future(drain()))

    def loaded(task: asyncio.Future[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            server.should_exit = True

    load = None
    if loading is not None:
        load = asyncio.ensure_future(loading)
        load.add_done_callback(loaded)
    with _signals(end):
        await server.serve()
    if load is not None and load.done() and not load.cancelled():
        load.result()
    for task in (load, *ending):
        if task is not None:
            task.cancel()


@contextlib.contextmanager
def _signals(handle: Callable[[], None]) -> Generator[None, None, None]:
    """On the main thread; elsewhere signals are somebody else's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(handle))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def model_names(model: str, settings: ServeSettings) -> tuple[str, tuple[str, ...]]:
    """The served name, and the others that mean the same: more served ones, what the user typed, its last part."""
    last = PurePath(model).name.removesuffix(".gguf") or model
    name, *others = settings.served_model_name or (last,)
    return name, (*others, last, model, "default")


def run_server(load: Callable[[], LanguageModel], settings: ServeSettings, model: str = "forerun") -> None:
    """Serve what `load` gives; `model` is what the user calls it. Returns when a signal has ended it."""
    check_settings(settings)
    asyncio.run(_run(load, settings, model))


async def _run(load: Callable[[], LanguageModel], settings: ServeSettings, model: str) -> None:
    from forerun.serve.app import create_app
    from forerun.serve.daemon_threads import beside
    from forerun.serve.local_engine import LocalEngine
    from forerun.serve.metrics import Metrics
    from forerun.serve.model_service import ModelService, loaded_model

    name, aliases = model_names(model, settings)
    with _kv_events(settings, name) as opened:
        engine = LocalEngine(settings, opened)
        service = ModelService(
            name, engine, aliases, listed=settings.served_model_name, any_name=settings.any_model_name
        )

        async def make_ready() -> None:
            model = loaded_model(await engine.load(load), settings)
            await beside(lambda: model.grammar_vocabulary)  # now, and not while the first client waits for it
            service.ready(model)
            log.info("ready: %s", name)

        app = create_app(service, settings, Metrics(engine.readings, name, settings.metrics_names))
        await serve(app, engine, settings, make_ready())


@contextlib.contextmanager
def _kv_events(settings: ServeSettings, name: str) -> Generator[Callable[[LanguageModel], None], None, None]:
    """What follows the cache of the model, for as long as it serves."""
    if settings.kv_events is None:
        yield lambda _: None
        return
    from forerun.serve.kv_events import KvEventPublisher

    topic = settings.kv_events_topic or f"kv@{socket.gethostname()}@{name}"
    publisher = KvEventPublisher(settings.kv_events, topic)
    log.info("events of the cache at %s, topic %s", settings.kv_events, topic)
    try:
        yield publisher.follow
    finally:
        publisher.close()
