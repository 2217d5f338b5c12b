"""Connections of clients that dribble: heads of requests that never end, and answers that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 30.0  # for the head of a request
UNSENT = 16 << 10  # bytes of an answer that wait here, and as many in the system, before its reader counts as late
STALLED, LEAST = 30.0, 4 << 10  # seconds in which a late reader must take so many bytes: what it holds, others wait for

log = logging.getLogger("forerun")


class Connection(H11Protocol):
    """uvicorn's protocol with limits it does not have. Bodies have theirs in `body_limit`.

    Systems buffer megabytes for a reader that is not there: thousands of tokens, whose pages others wait for.
    """

    _timer: asyncio.TimerHandle | None = None
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT)
        endpoint = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and endpoint.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # some systems refuse it where the client is gone already
                endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._start()  # part of a head
        else:
            self._stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._forgive()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._forgive()
        super().connection_lost(exc)

    def _watch(self, unsent: int) -> None:
        """One timer while a reader is late, instead of one for every event that is sent."""

        def check() -> None:
            now = self.transport.get_write_buffer_size()
            if now <= unsent - LEAST:
                self._watch(now)
            else:
                log.warning("a connection was ended: its client took next to nothing for %g seconds", STALLED)
                self.transport.abort()

        self._late = self.loop.call_later(STALLED, check)

    def _forgive(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
