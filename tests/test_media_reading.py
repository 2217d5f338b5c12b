"""Media of requests while they wait for a thread that reads them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

from fake_media import FakeReader, seeing_tokenizer
from serve_fakes import until

from forerun.serve.media_reading import MediaReading
from forerun.serve.sent_media import SentMedia
from forerun.serve.settings import ServeSettings


class Sent(str):
    """Media whose end can be seen."""


class HeldUp(FakeReader):
    """Reads nothing until it is told to."""

    entered, go_on = 0, threading.Event()

    def read(self, ids: Any, parts: Any) -> Any:
        self.entered += 1
        assert self.go_on.wait(30)
        return super().read(ids, parts)


def test_media_of_those_who_left_the_queue_are_not_kept() -> None:
    reader = HeldUp(seeing_tokenizer())

    async def leave() -> None:
        reading = MediaReading(ServeSettings())

        def begun(source: str) -> asyncio.Task[Any]:
            media = (SentMedia("image", source, "messages", bare=True),)
            return asyncio.ensure_future(reading.read(reader, list(reader.placeholders)[:1], media))

        slow = [begun("AAAA") for _ in range(2)]  # as many as there are threads
        await asyncio.to_thread(until, lambda: reader.entered == 2)
        source = Sent("BBBB")
        seen, third = weakref.ref(source), begun(source)
        await asyncio.sleep(0)  # it waits for a thread now
        del source
        third.cancel()
        await asyncio.wait([third])
        del third
        gc.collect()
        assert seen() is None, "nobody will ever read it"
        reader.go_on.set()
        assert all(read.ids for read in await asyncio.gather(*slow))

    try:
        asyncio.run(leave())
    finally:
        reader.go_on.set()
