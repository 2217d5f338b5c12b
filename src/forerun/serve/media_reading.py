"""Media of requests on their way into prompts: decoded and encoded beside the event loop, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from forerun.errors import ForerunError
from forerun.media.parts import MediaOutOfMemory, MediaPart, MediaPrompt, MediaReader, PromptTooLong
from forerun.media.reading import what_is_read
from forerun.serve.errors import ApiError, bad_request, try_later
from forerun.serve.generation import too_long
from forerun.serve.off_loop import OffLoop
from forerun.serve.sent_media import SentMedia, param_of
from forerun.serve.settings import ServeSettings
from forerun.text.content import PLURALS

Made = TypeVar("Made")
MOST_CHARACTERS = 512 << 20  # of media that are read or wait for it: they are in memory all that time


class MediaReading:
    """On threads of its own: prompts without media do not wait for those that have some."""

    def __init__(self, settings: ServeSettings) -> None:
        # A picture waits for its turn like everything else, and may take as long as that.
        self._off_loop = OffLoop(settings.queue_timeout)
        self._held = 0  # characters

    async def read(self, reader: MediaReader, ids: Sequence[int], media: tuple[SentMedia, ...]) -> MediaPrompt:
        """The prompt with rows in place of its placeholders. What is wrong with a part is a 400 that names it."""
        return await self._with_parts(media, lambda parts: reader.read(ids, parts))

    async def count(self, reader: MediaReader, ids: Sequence[int], media: tuple[SentMedia, ...]) -> int:
        """Tokens of that prompt, with the same errors."""
        return await self._with_parts(media, lambda parts: reader.count(ids, parts))

    async def _with_parts(self, media: tuple[SentMedia, ...], act: Callable[[Sequence[MediaPart]], Made]) -> Made:
        waiting = [media]  # emptied when nobody waits any more: work that never begins stays in its queue a while

        def work() -> Made:
            media = waiting.pop()
            try:
                return act([one.part() for one in media])
            except MediaOutOfMemory as error:
                raise ApiError(503, str(error), code="out_of_memory") from None
            except PromptTooLong as error:
                conversation = media[0].param.partition("[")[0]  # it is too long as a whole
                raise too_long(error.context, error.tokens, conversation, "at least ") from error
            except ForerunError as error:
                raise bad_request(f"{str(error).rstrip('.')}.", param_of(error, media)) from error

        size = sum(len(one.source) for one in media)
        if self._held and self._held + size > MOST_CHARACTERS:
            raise try_later(429, "Too many media of other requests are being read: try again later.", "queue_full")
        self._held += size
        try:
            return await self._off_loop.run(work, media[0].param)
        finally:
            waiting.clear()
            self._held -= size

    async def end(self) -> None:
        """See `OffLoop.end`."""
        await self._off_loop.end()


def checked(reader: MediaReader | None, media: Sequence[SentMedia]) -> MediaReader:
    """The reader, when it can read all of these."""
    for one in media:
        if reader is None or one.kind not in reader.kinds:
            message = f"The model reads {what_is_read(reader)}: {PLURALS[one.kind]} are not supported."
            raise bad_request(message, one.param, "unsupported_media")
    assert reader is not None, "without media there is nothing to read"
    return reader
