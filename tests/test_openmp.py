"""Worker threads of torch's: an engine computes without them, others give them back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from forerun.engine.ownership import Ownership
from forerun.openmp import limit_workers, release_workers
from forerun.serve.daemon_threads import DaemonThreads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has another OpenMP")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Whatever the suite runs with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    release_workers()
    time.sleep(0.05)  # until they are gone
    yield
    release_workers()
    torch.set_num_threads(before)


def compute() -> None:
    torch.set_num_threads(2)  # of the thread that calls it
    torch.ones(1 << 20).exp_()


def workers() -> int:
    """Threads of the process that are none of Python's: torch's, and what else there may be all the time."""
    ours = {thread.native_id for thread in threading.enumerate()}
    return len({int(task) for task in os.listdir("/proc/self/task")} - ours)


def becomes(expected: int) -> bool:
    """A thread that ends takes a moment to be gone."""
    end = time.monotonic() + 5
    while workers() != expected and time.monotonic() < end:
        time.sleep(0.001)
    return workers() == expected


def test_workers_go_and_come_again() -> None:
    before = workers()
    for _ in range(2):
        compute()
        assert becomes(before + 1)
        release_workers()
        assert becomes(before)
    release_workers()  # nobody is left


def test_no_more_of_them_than_a_container_may_keep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limit_workers(1.0)
    assert torch.get_num_threads() == 2  # the user said so
    monkeypatch.delenv("OMP_NUM_THREADS")
    for allowed, threads_then in ((None, 2), (64.0, 2), (1.9, 1), (0.2, 1)):
        limit_workers(allowed)
        assert torch.get_num_threads() == threads_then


def test_an_engine_computes_without_them() -> None:
    """And its thread has them again outside, as every other thread has all the time."""
    before, owner, told = workers(), Ownership(CPU), list[int]()

    def other() -> None:
        torch.ones(1 << 20).exp_()
        told.append(torch.get_num_threads())

    with owner, owner:
        torch.ones(1 << 20).add_(1)
        assert workers() == before and torch.get_num_threads() == 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert told == [2] and torch.get_num_threads() == 2
    compute()
    assert becomes(before + 1)


def test_threads_that_live_on_keep_none() -> None:
    before, pool = workers(), DaemonThreads(1, "test")
    try:
        for _ in range(2):
            pool.submit(compute).result()
            assert becomes(before)
    finally:
        pool.shutdown()
