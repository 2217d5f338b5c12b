"""A pass as one call: stages of compiled loops, whose pieces threads of our own take as they come free.

The calling thread leads: it alone moves from stage to stage. The others take pieces while a stage has some, look out
for the next one for a short time, and then sleep. A thread that the system has stopped holds up nothing but the piece
that it took. All of them agree by one number, the ticket: (run, stage, next piece).
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.kernels.cpu.emit import Function, Module, Value
from forerun.kernels.cpu.machine import Body, Code

# Where things are in the memory that the threads share; what is written often has a cache line of its own.
TICKET, DONE, TOTAL, PROGRAM, ASLEEP, STOP, ALLOWED, MUTEX, WAKE, WAITED, SPENT = (
    0,
    64,
    128,
    136,
    192,
    200,
    208,
    256,
    384,
    512,
    520,
)
SHARED_BYTES = 640
RUN, STAGE = 40, 24  # the ticket's bits: run from 40 on, stage from 24, the next piece below
IDLE, BETWEEN = 0xFFFF, 0xFFFE  # as a stage: between two runs, and between two stages
SPINS = 4000  # looks at the ticket before a thread goes to sleep: some tens of microseconds
YIELD = 2000  # looks at a piece that another thread still works on before the processor is offered to others

# A stage is a row of 64-bit words: how many loops it has, then for each of them what `Loop.words` lists.
OPS, OP_WORDS = 4, 6
STAGE_WORDS = 1 + OPS * OP_WORDS


@dataclass(slots=True)
class LoopCall:
    """One compiled loop of a stage: called with its arguments and the number of a piece."""

    function: int  # address of void(arguments, piece)
    arguments: np.ndarray  # int64; kept alive with the program
    rows: int  # address of the int32 that says how many rows there are
    pieces: int  # across the columns
    rows_per_piece: int
    name: str = ""

    def words(self) -> list[int]:
        return [self.function, self.arguments.ctypes.data, self.rows, self.pieces, self.rows_per_piece, 0]


@dataclass(slots=True)
class Program:
    """Stages in order: all pieces of one are done before the next begins. Loops of a stage do not use each other."""

    stages: list[list[LoopCall]] = field(default_factory=list)
    table: np.ndarray | None = None

    def close(self) -> None:
        """Write the table that the threads read."""
        self.table = np.zeros((len(self.stages), STAGE_WORDS), np.int64)
        for row, stage in zip(self.table, self.stages, strict=True):
            assert len(stage) <= OPS
            words = [len(stage), *(word for loop in stage for word in loop.words())]
            row[: len(words)] = words


def write_threads(module: Module, body: Body) -> None:
    """void lead(shared, stages, count) and void work(shared, index)."""
    for line in (
        "i32 @pthread_mutex_lock(ptr)",
        "i32 @pthread_mutex_unlock(ptr)",
        "i32 @pthread_cond_wait(ptr, ptr)",
        "i32 @pthread_cond_broadcast(ptr)",
        "i32 @sched_yield()",
        "i64 @llvm.readcyclecounter()",
    ):
        module.declare(line)
    _write_pieces(module)
    _write_do(module)
    _write_lead(module, body.triple)
    _write_work(module, body.triple)


def _write_pieces(module: Module) -> None:
    """i64 pieces(loop): of one loop, for as many rows as there are now."""
    f = module.function("pieces", [("loop", "ptr")], "i64")
    rows = f.convert(f.load(f.load(f["loop"], "ptr", 16, 8), "i32", 0, 4), "sext", "i64")
    per_piece = f.load(f["loop"], "i64", 32, 8)
    f.ret((rows + per_piece - 1) // per_piece * f.load(f["loop"], "i64", 24, 8))


def _write_do(module: Module) -> None:
    """void do(stage, piece): finds the loop that a piece belongs to, and runs it."""
    f = module.function("do", [("stage", "ptr"), ("piece", "i64")])
    count = f.load(f["stage"], "i64", 0, 8)
    out = f.fresh("out")
    with f.loop(0, count, carry=[f["piece"]]) as op:
        loop = f.at(f["stage"], op.index * (8 * OP_WORDS) + 8)
        left = op.carried[0] - f.call("pieces", "i64", loop)
        op.next = [left]
        with f.when(f.compare("slt", left, 0)):
            function, arguments = f.load(loop, "ptr", 0, 8), f.load(loop, "ptr", 8, 8)
            f.line(f"call void {function.name}(ptr {arguments.name}, i64 {op.carried[0].name})")
            f.jump(out)
            f.block(f.fresh("never"))
    f.jump(out)
    f.block(out)
    f.ret()


def _total(f: Function, stage: Value) -> Value:
    """Pieces of all loops of a stage."""
    with f.loop(0, f.load(stage, "i64", 0, 8), carry=[f.constant(0)]) as op:
        op.next = [op.carried[0] + f.call("pieces", "i64", f.at(stage, op.index * (8 * OP_WORDS) + 8))]
    return op.result[0]


def _pause(f: Function, triple: str) -> None:
    """Lets the other half of a core work, where there is one."""
    if triple == "x86_64":
        f.intrinsic("llvm.x86.sse2.pause", "void")
    elif triple == "aarch64":
        f.intrinsic("llvm.aarch64.hint", "void", f.constant(1, "i32"))


def _write_lead(module: Module, triple: str) -> None:
    """The leader's part of a run."""
    f = module.function("lead", [("shared", "ptr"), ("stages", "ptr"), ("count", "i64")])
    shared = f["shared"]
    alone = f.compare("sle", f.load(shared, "i64", ALLOWED, 8), 1)
    single, several, end = f.fresh("single"), f.fresh("several"), f.fresh("end")
    f.branch(alone, single, several)
    f.block(single)
    with f.loop(0, f["count"]) as stage:
        here = f.at(f["stages"], stage.index * (8 * STAGE_WORDS))
        with f.loop(0, _total(f, here)) as each:
            f.call("do", "void", here, each.index)
    f.jump(end)

    f.block(several)
    run = ((f.read_shared(shared, TICKET) >> RUN) + 1) << RUN
    f.store(f["stages"], shared, PROGRAM, 8)
    looks, woken = f.room(8), f.room(8)
    f.store(f.constant(0), woken, 0, 8)
    start = f.call("llvm.readcyclecounter", "i64")
    with f.loop(0, f["count"]) as stage:
        here = f.at(f["stages"], stage.index * (8 * STAGE_WORDS))
        total = _total(f, here)
        one, many, over = f.fresh("one"), f.fresh("many"), f.fresh("over")
        f.branch(f.compare("sle", total, 1), one, many)
        f.block(one)  # what cannot be shared is not announced
        with f.loop(0, total) as only:
            f.call("do", "void", here, only.index)
        f.jump(over)
        f.block(many)
        # First nothing can be taken: a thread that saw the old ticket with the new total would take what is not there.
        f.write_shared(run | (BETWEEN << STAGE), shared, TICKET)
        f.store(total, shared, TOTAL, 8)
        f.write_shared(f.constant(0), shared, DONE)
        f.write_shared(run | (stage.index << STAGE), shared, TICKET)
        with f.when(f.compare("eq", f.load(woken, "i64", 0, 8), 0)):  # sleeping threads are woken once in a run
            f.store(f.constant(1), woken, 0, 8)
            with f.when(f.compare("sgt", f.read_shared(shared, ASLEEP), 0)):
                f.call("pthread_mutex_lock", "i32", f.at(shared, MUTEX))
                f.call("pthread_cond_broadcast", "i32", f.at(shared, WAKE))
                f.call("pthread_mutex_unlock", "i32", f.at(shared, MUTEX))
        with f.forever() as (_, taken):
            ticket = f.read_shared(shared, TICKET)
            piece = ticket & ((1 << STAGE) - 1)
            f.leave_when(f.compare("sge", piece, total), taken)
            with f.when(f.exchange(shared, TICKET, ticket, ticket + 1)):
                f.call("do", "void", here, piece)
                f.add_shared(shared, DONE, 1)
        with f.when(f.compare("slt", f.read_shared(shared, DONE), total)):
            began = f.call("llvm.readcyclecounter", "i64")
            f.store(f.constant(0), looks, 0, 8)
            with f.forever() as (_, done):
                f.leave_when(f.compare("sge", f.read_shared(shared, DONE), total), done)
                _pause(f, triple)
                looked = f.load(looks, "i64", 0, 8) + 1
                f.store(looked, looks, 0, 8)
                with f.when(f.compare("sgt", looked, YIELD)):
                    f.call("sched_yield", "i32")
            _count(f, shared, WAITED, began)
        f.jump(over)
        f.block(over)
    f.write_shared(run | (IDLE << STAGE), shared, TICKET)
    _count(f, shared, SPENT, start)
    f.jump(end)
    f.block(end)
    f.ret()


def _count(f: Function, shared: Value, place: int, began: Value) -> None:
    """Adds the cycles since then."""
    spent = f.call("llvm.readcyclecounter", "i64") - began
    f.store(f.load(shared, "i64", place, 8) + spent, shared, place, 8)


def _write_work(module: Module, triple: str) -> None:
    """What every other thread does until it is told to stop."""
    f = module.function("work", [("shared", "ptr"), ("index", "i64")])
    shared = f["shared"]
    spins = f.room(8)
    f.store(f.constant(0), spins, 0, 8)
    with f.forever() as (_, out):
        f.leave_when(f.compare("ne", f.read_shared(shared, STOP), 0), out)
        ticket = f.read_shared(shared, TICKET)
        stage, piece = (ticket >> STAGE) & 0xFFFF, ticket & ((1 << STAGE) - 1)
        total = f.load(shared, "i64", TOTAL, 8)
        busy = f.compare("slt", stage, BETWEEN) & f.compare("slt", f["index"], f.read_shared(shared, ALLOWED))
        mine = busy & f.compare("slt", piece, total)
        with f.when(mine):
            table = f.load(shared, "ptr", PROGRAM, 8)
            with f.when(f.exchange(shared, TICKET, ticket, ticket + 1)):
                f.call("do", "void", f.at(table, stage * (8 * STAGE_WORDS)), piece)
                f.add_shared(shared, DONE, 1)
                f.store(f.constant(0), spins, 0, 8)
        _pause(f, triple)
        count = f.load(spins, "i64", 0, 8) + 1
        f.store(count, spins, 0, 8)
        with f.when(f.compare("sgt", count, SPINS)):
            f.store(f.constant(0), spins, 0, 8)
            f.call("pthread_mutex_lock", "i32", f.at(shared, MUTEX))
            f.add_shared(shared, ASLEEP, 1)
            now = f.read_shared(shared, TICKET)
            idle = f.compare("eq", (now >> STAGE) & 0xFFFF, IDLE) | f.compare(
                "sge", f["index"], f.read_shared(shared, ALLOWED)
            )
            with f.when(idle & f.compare("eq", f.read_shared(shared, STOP), 0)):
                f.call("pthread_cond_wait", "i32", f.at(shared, WAKE), f.at(shared, MUTEX))
            f.add_shared(shared, ASLEEP, -1)
            f.call("pthread_mutex_unlock", "i32", f.at(shared, MUTEX))
    f.ret()


class Threads:
    """The threads of a process, started when the second one is first asked for.

    How many take part follows what is seen. Where the leader has to wait for others for much of a run, the system runs
    something else on their processors: then fewer threads are faster. From time to time all of them are tried again.
    """

    LOST = 0.3  # of a run's time, waited for others, beyond which one thread less takes part
    SMOOTHING = 0.25  # weight of the newest run in that average
    WORTH = 200_000  # cycles of a run that says something about it
    FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds until all threads are tried again
    GOOD = 32  # runs of all threads after which a pause is short again

    def __init__(self, code: Code, most: int) -> None:
        self.most = max(1, most)
        self.allowed = self.most  # take part in the next run, the calling thread included
        self._code, self._started = code, 1
        self._memory = np.zeros(SHARED_BYTES + 64, np.uint8)
        start = -self._memory.ctypes.data % 64
        self._words = self._memory[start : start + SHARED_BYTES].view(np.int64)
        self._words[TICKET // 8] = IDLE << STAGE
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self._lead = code.function("lead", [pointer, pointer, whole])
        self._work = code.function("work", [pointer, whole])
        self._shared = self._words.ctypes.data
        self._stop = weakref.finalize(self, _stop, code, self._memory, self._words)
        self._lock = threading.Lock()
        self._lost, self._pause, self._again, self._good = 0.0, self.FIRST_PAUSE, 0.0, 0

    def run(self, program: Program) -> None:
        """All stages. One thread at a time leads."""
        table = program.table
        assert table is not None
        with self._lock:
            if self.allowed < self.most and time.monotonic() >= self._again:
                self.allowed = self.most
            if self.allowed > self._started:
                self._start()
            words = self._words
            words[ALLOWED // 8] = self.allowed
            waited, spent = words[WAITED // 8], words[SPENT // 8]
            self._lead(self._shared, table.ctypes.data, len(table))
            if self.allowed > 1:
                self._learn(int(words[WAITED // 8] - waited), int(words[SPENT // 8] - spent))

    def _learn(self, waited: int, spent: int) -> None:
        """From a run of several threads: should fewer take part?"""
        if spent < self.WORTH:
            return
        self._lost += self.SMOOTHING * (waited / spent - self._lost)
        self._good += 1
        if self._lost > self.LOST:
            self.allowed -= 1
            self._again = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
            self._lost, self._good = 0.0, 0
        elif self._good > self.GOOD:
            self._pause = self.FIRST_PAUSE

    def _start(self) -> None:
        for index in range(self._started, self.allowed):
            # The function and its memory, not `self`: a thread that never ends would keep it alive.
            work, shared, kept = self._work, self._shared, (self._memory, self._code)
            thread = threading.Thread(
                target=_run_worker, args=(work, shared, index, kept), name=f"forerun-{index}", daemon=True
            )
            thread.start()
        self._started = max(self._started, self.allowed)


def _run_worker(work: object, shared: int, index: int, kept: Sequence[object]) -> None:  # noqa: ARG001
    """`kept` lives as long as the thread."""
    work(shared, index)  # type: ignore[operator]


def _stop(code: Code, memory: np.ndarray, words: np.ndarray) -> None:  # noqa: ARG001
    """Every thread leaves."""
    words[STOP // 8] = 1
    library = ctypes.CDLL(None)
    mutex, wake = (ctypes.c_void_p(words.ctypes.data + place) for place in (MUTEX, WAKE))
    library.pthread_mutex_lock(mutex)
    library.pthread_cond_broadcast(wake)
    library.pthread_mutex_unlock(mutex)
