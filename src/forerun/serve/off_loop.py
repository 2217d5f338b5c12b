"""Work that would keep the event loop waiting: templates, tokenizers, grammars. On few threads, for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from forerun.errors import ForerunError
from forerun.serve.daemon_threads import DaemonThreads
from forerun.serve.errors import bad_request, try_later

Result = TypeVar("Result")

THREADS = 2  # more would only take time from the engine
END = 5.0  # seconds for work that has begun, when a server ends


class OffLoop:
    """What is wrong with the input is the client's to know; a thread that does not come back is not waited for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._threads = DaemonThreads(THREADS, "forerun prompts")

    async def run(self, work: Callable[[], Result], param: str) -> Result:
        """`param`: the field of the request that it is about."""
        begun = False

        def begin() -> Result:
            nonlocal begun
            begun = True
            return work()

        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, begin)
        except RuntimeError:
            raise try_later(503, "The server is shutting down.") from None
        try:
            # Not `wait_for`: in Python 3.11 it takes no notice of being cancelled when the result is just there.
            async with asyncio.timeout(self._seconds):
                return await running
        except TimeoutError:
            if not begun:  # others' prompts took all the time
                raise try_later(503, "The server is busy with the prompts of others: try again later.") from None
            raise bad_request(f"It took longer than {self._seconds:g} seconds to prepare this.", param) from None
        except ForerunError as error:
            raise bad_request(str(error), param) from error
        except RecursionError:
            raise bad_request("It is nested too deeply.", param) from None

    def close(self) -> None:
        """Nothing new; threads end with the work that they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def end(self, seconds: float = END) -> None:
        """Close, and wait a while for that work: Python would kill its thread, which torch does not survive."""
        self.close()
        await asyncio.to_thread(self._threads.join, seconds)
