"""Before the first request that leaves the arm to forerun: whatever it may choose has run, and its cost is known."""

from __future__ import annotations

from forerun.draft.arms import SERVED
from forerun.engine.engine import Engine
from forerun.engine.interrupts import interrupts_held, interrupts_let_through
from forerun.engine.request import Request
from forerun.engine.sequence import Status
from forerun.progress import Progress
from forerun.sample.parameters import SamplingParams


class Silence:
    """A sink for tokens nobody reads."""

    def push(self, token: int) -> tuple[str, bool]:  # noqa: ARG002
        return "", False

    def flush(self) -> str:
        return ""


def warm_up(engine: Engine, filtered: bool, progress: Progress, batch: int = 1) -> None:
    """Only while nobody waits for an answer. `batch`: as many sequences as will run at once."""
    with interrupts_held(), engine.owner:
        if not engine.scheduler.idle or engine.scheduler.waiting:
            return  # one that waits although all is idle has no room to begin, nor has whoever comes behind it
        engine.settle()  # the round of a sequence that a stop string has ended
        with interrupts_let_through():
            engine.runner.prepare(engine.max_width, filtered, progress, batch)
            if not engine.warm:
                engine.warm = True
                run_every_drafter(engine)


def run_every_drafter(engine: Engine) -> None:
    """Cold, and again to learn what its rounds cost."""
    prompt = tuple((31 * n + 5) % engine.vocab for n in range(min(24, engine.context // 2)))
    known = engine.costs.remembers
    for rounds in (1, 1 if known else 3):
        engine.costs.start_over()
        slow = [name for name, arms in SERVED.items() if name in engine.drafters and not arms[0].at_once]
        for arm in ("off", *slow):
            request = Request(prompt, SamplingParams(), 4 * rounds, draft=arm, draft_tokens=3)
            sequence = engine.submit(request, Silence())
            try:
                while sequence.status is not Status.FINISHED and sequence.counters.rounds < rounds:
                    engine.step()
            finally:
                engine.release(sequence)
