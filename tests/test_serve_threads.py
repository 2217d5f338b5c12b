"""Threads beside the event loop: they come when there is work, end with the server, and never hold up the process."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from fake_media import FakeReader, seeing_tokenizer
from serve_fakes import FakeEngine, app_for, call, live, until
from test_serve_run import DrainingEngine, served

from forerun.serve.daemon_threads import DaemonThreads
from forerun.serve.errors import ApiError
from forerun.serve.off_loop import OffLoop

PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'cat').decode()}"}}
ASKED: Any = {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "Hi"}]}]}


def prompt_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("forerun prompts")}


def test_threads_are_gone_when_the_server_has_ended() -> None:
    before, tokenizer = prompt_threads(), seeing_tokenizer()
    with live(app_for(FakeEngine(tokenizer=tokenizer), media=FakeReader(tokenizer))) as address:
        assert prompt_threads() <= before, "nobody needs one yet"
        assert call(address, "/v1/chat/completions", ASKED).status == 200
        assert len(prompt_threads() - before) >= 2, "one for texts, one for media"
    until(lambda: prompt_threads() <= before)


def test_a_server_that_ends_by_a_signal_ends_its_threads() -> None:
    before = prompt_threads()

    def script(address: str) -> None:
        assert call(address, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}).status == 200
        assert prompt_threads() - before
        os.kill(os.getpid(), signal.SIGTERM)

    served(DrainingEngine(), script)
    until(lambda: prompt_threads() <= before)


def test_work_goes_to_a_few_threads_in_order_and_ends_with_them() -> None:
    threads, go_on = DaemonThreads(2, "forerun prompts"), threading.Event()
    slow = [threads.submit(go_on.wait, 30) for _ in range(2)]
    third, fourth = threads.submit(lambda: 3), threads.submit(lambda: 1 / 0)
    until(lambda: all(one.running() for one in slow))
    assert not third.running() and not third.done()
    go_on.set()
    assert third.result(30) == 3 and isinstance(fourth.exception(30), ZeroDivisionError)
    assert [one.result(30) for one in slow] == [True, True]
    go_on.clear()
    busy = [threads.submit(go_on.wait, 30) for _ in range(2)]
    until(lambda: all(one.running() for one in busy))
    waiting = threads.submit(lambda: 4)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled() and not any(one.done() for one in busy)
    with pytest.raises(RuntimeError):
        threads.submit(lambda: 5)
    go_on.set()
    threads.shutdown()
    assert all(one.done() for one in busy)


def test_what_comes_after_the_end_is_a_503() -> None:
    async def main() -> None:
        off_loop = OffLoop(1.0)
        assert await off_loop.run(lambda: 3, "messages") == 3
        off_loop.close()
        with pytest.raises(ApiError) as late:
            await off_loop.run(lambda: 4, "messages")
        assert late.value.status == 503

    asyncio.run(main())


def test_the_process_does_not_wait_for_a_thread_that_does_not_come_back() -> None:
    program = """
        import asyncio, threading
        from forerun.serve.off_loop import OffLoop

        async def main():
            off_loop = OffLoop(0.1)
            try:
                await off_loop.run(lambda: threading.Event().wait(60), "messages")
            except Exception as error:
                print(type(error).__name__)
            off_loop.close()

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "ApiError\n" and done.returncode == 0, done.stderr


def test_an_orderly_end_waits_a_while_for_what_has_begun() -> None:
    """Python would kill a thread inside of torch, and the process with it."""

    async def main(seconds: float) -> bool:
        off_loop, begun, go_on, done = OffLoop(30.0), threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            assert go_on.wait(30)
            done.set()

        running = asyncio.ensure_future(off_loop.run(work, "messages"))
        await asyncio.to_thread(begun.wait, 30)
        asyncio.get_running_loop().call_later(0.05, go_on.set if seconds > 1 else lambda: None)
        await off_loop.end(seconds)
        ended = done.is_set()
        go_on.set()
        await asyncio.wait([running])
        return ended

    assert asyncio.run(main(30.0)) is True
    assert asyncio.run(main(0.1)) is False
