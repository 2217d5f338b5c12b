"""What the prefix cache holds, told to other programs over ZeroMQ in the form that vLLM's subscribers read.

A message has three frames: a topic, its number as 8 bytes, and a batch in MessagePack, `[time, [event, …], 0]`. Events
are positional: `["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name]`, `["BlockRemoved",
hashes, medium]` and `["AllBlocksCleared"]`. A hash is the first 64 bits of a page's name, as a whole number. Blocks
with media in them have a ninth field: by block the digest of its media, or nothing.

The engine's thread only appends to a buffer; a thread of its own encodes and sends. When that one falls behind, the
buffer is dropped and subscribers are told that all blocks are gone: they know too little then, and nothing wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forerun.cache.prefix import AllRemoved, PageEvent, PageRemoved, PageStored
from forerun.errors import ForerunError

if TYPE_CHECKING:
    import zmq

    from forerun.language_model import LanguageModel

log = logging.getLogger("forerun")

MOST_EVENTS = 1 << 14  # that wait to be sent
GATHER = 0.005  # seconds in which a round stores its pages: they leave in one message
MOST_UNSENT = 10_000  # messages that wait for one slow subscriber; further ones it misses, and sees that by the numbers
LINGER = 500  # milliseconds for the last messages at the end
GPU, HOST = "GPU", "CPU"  # vLLM's words for the two memories

WireEvent = list[Any]


class KvEventPublisher:
    """A PUB socket that is bound from the beginning; `follow` gives it something to say."""

    def __init__(self, address: str, topic: str) -> None:
        """`address`: one that `check_settings` has seen. `ForerunError` where it is taken."""
        import zmq

        self._topic = topic.encode()
        self._number = 0
        self._pool = GPU  # the memory that pages are in unless they have moved
        self._waiting: list[PageEvent] = []
        self._news = threading.Condition()
        self._ended = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._socket.ipv6 = "[" in address
        self._socket.sndhwm = MOST_UNSENT
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ForerunError(
                f"cannot publish at {address}: {error.strerror}; give --kv-events another port"
            ) from error
        self._thread = threading.Thread(target=self._run, name="forerun kv events", daemon=True)
        self._thread.start()

    def follow(self, model: LanguageModel) -> None:
        """Tell what its cache does from now on. Its engine must not be running."""
        pool = model.engine.pool
        if not pool.prefix.enabled:
            raise ForerunError("--kv-events has nothing to tell without a prefix cache: leave out --no-prefix-cache")
        self._pool = HOST if pool.device.type == "cpu" else GPU
        pool.prefix.listen(self.hear)

    def hear(self, event: PageEvent) -> None:
        """On the engine's thread."""
        with self._news:
            if len(self._waiting) >= MOST_EVENTS:
                self._waiting = [AllRemoved()]
            self._waiting.append(event)
            self._news.notify()

    def close(self) -> None:
        """Send what is left; the end."""
        with self._news:
            self._ended = True
            self._news.notify()
        self._thread.join()
        self._context.destroy(linger=LINGER)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
            time.sleep(GATHER)
            with self._news:
                events, self._waiting = self._waiting, []
            try:
                self._send(events)
            except Exception:
                log.exception("events of the cache could not be sent")

    def _send(self, events: list[PageEvent]) -> None:
        import msgspec

        payload = msgspec.msgpack.encode([time.time(), wire_events(events, self._pool), 0])
        number, self._number = self._number, self._number + 1
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])


def block_hash(key: bytes) -> int:
    """The name of a page as subscribers know it."""
    return int.from_bytes(key[:8], "big")


def wire_events(events: Iterable[PageEvent], pool: str) -> list[WireEvent]:
    """Pages that follow each other become one event. `pool`: the memory of pages that are resident.

    >>> a, b = PageStored(b"first-page", None, (1, 2)), PageStored(b"second-page", b"first-page", (3, 4))
    >>> [event] = wire_events([a, b], "GPU")
    >>> event[0], len(event[1]), event[2:]
    ('BlockStored', 2, [None, [1, 2, 3, 4], 2, None, 'GPU', None])
    >>> wire_events([PageRemoved(b"12345678"), AllRemoved()], "GPU")
    [['BlockRemoved', [3544952156018063160], 'GPU'], ['AllBlocksCleared']]
    """
    found: list[WireEvent] = []
    before: PageEvent | None = None
    for event in events:
        if isinstance(event, AllRemoved):
            found.append(["AllBlocksCleared"])
        elif isinstance(event, PageRemoved):
            if isinstance(before, PageRemoved) and before.resident == event.resident:
                found[-1][1].append(block_hash(event.key))
            else:
                found.append(["BlockRemoved", [block_hash(event.key)], pool if event.resident else HOST])
        elif isinstance(before, PageStored) and _follows(before, event):
            found[-1][1].append(block_hash(event.key))
            found[-1][3].extend(event.tokens)
        else:
            found.append(_stored(event, pool))
        before = event
    return found


def _follows(before: PageStored, event: PageStored) -> bool:
    """Can both be told in one event? Blocks with media are told one by one."""
    kind, other = ((one.resident, len(one.tokens), one.media) for one in (before, event))
    return event.parent == before.key and kind == other and not event.media


def _stored(event: PageStored, pool: str) -> WireEvent:
    parent = None if event.parent is None else block_hash(event.parent)
    medium, lora_id, lora_name = pool if event.resident else HOST, None, None
    tokens = list(event.tokens)
    wire = ["BlockStored", [block_hash(event.key)], parent, tokens, len(tokens), lora_id, medium, lora_name]
    return [*wire, [[event.media.hex()]]] if event.media else wire
