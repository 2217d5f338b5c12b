"""Threads of the CPU's own that share the pieces of a pass: every piece runs once, and stages follow each other."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import time
import weakref

import numpy as np
import pytest
from cpu_bodies import FIRST, kernels_of

from forerun.kernels.cpu.loops import ARGUMENTS
from forerun.kernels.cpu.ops import word_of
from forerun.kernels.cpu.threads import OPS, LoopCall, Program, Threads

ROWS, WIDTH = 37, 20


class Counting:
    """A pass whose result says how often each row was added to: `x ← x + ones`, stage after stage."""

    def __init__(self, stages: int, loops: int = 1, per_piece: int = 1) -> None:
        self.count = np.array([ROWS], np.int32)
        self.ones = np.ones((ROWS, WIDTH), np.float32)
        self.rows = [np.zeros((ROWS, WIDTH), np.float32) for _ in range(loops)]
        self.program, self.stages = Program(), stages
        function = kernels_of(FIRST).library.loop("sum")
        for _ in range(stages):
            calls = []
            for x in self.rows:
                words = {"rows": self.count.ctypes.data, "per_piece": per_piece, "x": x.ctypes.data, "xs": 4 * WIDTH}
                words |= {"other": self.ones.ctypes.data, "ts": 4 * WIDTH, "n": WIDTH, "out": x.ctypes.data}
                words |= {"os": 4 * WIDTH}
                arguments = np.array([words[name] for name in ARGUMENTS["sum"]], np.int64)
                calls.append(LoopCall(function, arguments, self.count.ctypes.data, 1, per_piece))
            self.program.stages.append(calls)
        self.program.close()

    def check(self, runs: int) -> None:
        rows = int(self.count[0])
        for x in self.rows:
            assert (x[:rows] == runs * self.stages).all() and (x[rows:] == 0).all()


def new_threads(most: int) -> Threads:
    threads = Threads(kernels_of(FIRST).library._code("base", lambda _: None), most)
    threads._again, threads.WORTH = math.inf, 2**62  # how many take part is up to the test
    return threads


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_many_short_runs(most: int) -> None:
    threads, work = new_threads(most), Counting(stages=6)
    for _ in range(300):
        threads.run(work.program)
    work.check(300)


def test_several_loops_share_a_stage_and_pieces_may_be_wide() -> None:
    for per_piece in (1, 5, 64):
        threads, work = new_threads(3), Counting(3, OPS, per_piece)
        for _ in range(50):
            threads.run(work.program)
        work.check(50)


def test_the_number_of_rows_is_read_when_a_pass_runs() -> None:
    threads, work = new_threads(2), Counting(3, per_piece=2)
    for rows in (1, 0, ROWS):
        work.rows[0][:] = 0
        work.count[0] = rows
        threads.run(work.program)
        work.check(1)


def test_a_stage_begins_when_every_piece_of_the_one_before_is_done() -> None:
    """Pieces in Python, of which those of other threads take their time."""
    leader, begun, done = threading.get_ident(), [0] * 6, [0] * 6
    helped, early = [0], [0]

    def piece(arguments: int, _: int) -> None:
        stage = int(np.ctypeslib.as_array(ctypes.cast(arguments, ctypes.POINTER(ctypes.c_int64)), (1,))[0])
        begun[stage] += 1
        early[0] += any(count % pieces for count in done[:stage])
        if threading.get_ident() == leader:
            time.sleep(0.002)  # so that others have a chance
        else:
            helped[0] += 1
            time.sleep(0.01)
        done[stage] += 1

    pieces, threads, program = 4, new_threads(3), Program()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(piece)
    function, count = ctypes.cast(call, ctypes.c_void_p).value, np.array([pieces], np.int32)
    assert function is not None
    for stage in range(6):
        program.stages.append([LoopCall(function, np.array([stage], np.int64), count.ctypes.data, 1, 1)])
    program.close()
    for _ in range(3):
        threads.run(program)
    assert begun == done == [3 * pieces] * 6 and helped[0] > 0 and early[0] == 0


def test_fewer_threads_and_more_again() -> None:
    threads, work = new_threads(4), Counting(4)
    for run, allowed in enumerate((1, 3, 2, 4, 1, 4), 1):
        threads.allowed = allowed
        threads.run(work.program)
        work.check(run)


def test_threads_start_when_they_are_first_asked_for() -> None:
    before = set(threading.enumerate())
    threads, work = new_threads(3), Counting(2)
    threads.allowed = 1
    threads.run(work.program)
    assert set(threading.enumerate()) <= before
    threads.allowed = 3
    threads.run(work.program)
    assert len(set(threading.enumerate()) - before) == 2
    work.check(2)


def test_a_run_while_the_others_sleep() -> None:
    """They are woken, and take part again."""
    threads, work = new_threads(2), Counting(20)
    for run in range(1, 4):
        threads.run(work.program)
        work.check(run)
        asleep = threads._words[192 // 8 : 192 // 8 + 1]
        end = time.monotonic() + 10
        while asleep[0] < 1 and time.monotonic() < end:
            time.sleep(0.001)
        assert asleep[0] == 1, "a thread with nothing to do goes to sleep"


def test_one_run_at_a_time_whoever_calls() -> None:
    threads, work = new_threads(2), Counting(4)
    callers = [threading.Thread(target=lambda: [threads.run(work.program) for _ in range(50)]) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    work.check(150)


def test_threads_end_with_their_engine() -> None:
    before = set(threading.enumerate())
    threads, work = new_threads(3), Counting(2)
    threads.run(work.program)
    started = set(threading.enumerate()) - before
    gone = weakref.ref(threads)
    del threads
    gc.collect()
    assert gone() is None and len(started) == 2
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_a_short_word_keeps_its_number() -> None:
    """Factors travel in the lower half of a 64-bit word."""
    for number in (0.0, -0.0, 1.5, -3e-38, 65504.0):
        assert np.array([word_of(number)], np.int64).view(np.float32)[0] == np.float32(number)
