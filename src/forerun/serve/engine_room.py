"""The half of the local engine that lives on the engine's thread: it submits, releases and hands over what came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from forerun.device import out_of_memory
from forerun.engine.sequence import Emission, Status
from forerun.engine.sequence import Sequence as Running
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.memory import return_freed_memory
from forerun.sample.constraint import ConstraintStuck
from forerun.sample.row import RowError
from forerun.serve.engine_client import Ended, Work
from forerun.serve.errors import ApiError
from forerun.serve.local_answer import LocalAnswer
from forerun.serve.tally import Bin, Tally, Times

log = logging.getLogger("forerun")
TIDY = 10.0  # seconds of rounds between two times that freed memory goes back
HandOver = tuple[LocalAnswer, Sequence[Emission], Ended | Exception | None]


@dataclass(slots=True, eq=False)
class Live:
    """An answer under way, as the engine's thread sees it."""

    work: Work
    answer: LocalAnswer
    times: Times
    sequence: Running | None = None
    read: int = 0  # prompt tokens that the tally knows
    texts: list[str] = field(default_factory=list)
    counted: tuple[int, int, int] = (0, 0, 0)  # rounds, drafted and accepted that the tally knows


class EngineRoom:
    """Runs on the engine's thread; other threads may look at `lives`, `blocked` and `tally`."""

    def __init__(self, model: LanguageModel, tally: Tally, forget: Callable[[LocalAnswer], object]) -> None:
        """`forget`: told of answers whose event loop is gone."""
        self.model, self.engine, self.tally, self._forget = model, model.engine, tally, forget
        self.lives: dict[int, Live] = {}  # by sequence
        self.blocked = False  # does anybody wait for room?
        self._tidied = time.perf_counter()

    def submit(self, lives: Sequence[Live]) -> None:
        """All choices of a request, or none."""
        try:
            for live in lives:
                work = live.work
                live.sequence = self.engine.submit(work.request, work.sink, work.constraint)
                if work.request.media is not None:  # the sequence gives them up when its prompt has been read
                    live.work = replace(work, request=replace(work.request, media=None))
                self.lives[live.sequence.id] = live
        except Exception as error:  # noqa: BLE001 - whatever it is, it is theirs
            for live in lives:
                self.release(live)
            self._hand_over([(live.answer, (), client_error(error)) for live in lives])

    def release(self, live: Live, reason: str = "abort") -> None:
        """Its reader wants no more, or it has ended: free all it holds. Safe any number of times."""
        sequence = live.sequence
        if sequence is not None and self.lives.get(sequence.id) is live:
            self.engine.release(sequence)
            live.times.ended = time.perf_counter()
            self.tally.ended(self.lives, sequence)
            self.tally.finished(reason, live.times, sequence)

    def hold(self, live: Live, held: bool) -> None:
        """Leave it out of the rounds, or take it in again."""
        if live.sequence is not None and live.sequence.id in self.lives:
            (self.engine.pause if held else self.engine.unpause)(live.sequence)

    def delivered(self) -> None:
        """After a round: everything it gave goes over to the event loop in one call."""
        now = time.perf_counter()
        batch: list[HandOver] = []
        round = Bin(now)
        for live in list(self.lives.values()):
            sequence = live.sequence
            assert sequence is not None
            if live.times.first is None:
                self._begin(live, sequence, round)
            emissions = list(sequence.emissions)
            if emissions:
                sequence.emissions.clear()
                self._count(live, sequence, emissions, round)
            last = self._last(live, sequence) if sequence.status is Status.FINISHED else None
            if emissions or last is not None:
                batch.append((live.answer, emissions, last))
        self.blocked = bool(self.engine.scheduler.waiting)
        self.tally.round(round)
        self._hand_over(batch)
        if now - self._tidied > TIDY:
            return_freed_memory()
            self._tidied = time.perf_counter()

    def _begin(self, live: Live, sequence: Running, round: Bin) -> None:
        """How far its prompt has been read."""
        if live.times.begun is None:
            live.times.begun = sequence.admitted
        read = min(max(live.read, sequence.cache.length), sequence.prompt_length)
        round.read += read - live.read
        live.read = read

    def _count(self, live: Live, sequence: Running, emissions: list[Emission], round: Bin) -> None:
        live.texts += [emission.text for emission in emissions]
        round.tokens += len(emissions)
        counters, (rounds, drafted, accepted) = sequence.counters, live.counted
        live.counted = (counters.rounds, counters.drafted, counters.accepted)
        round.rounds += counters.rounds - rounds
        round.drafted += counters.drafted - drafted
        round.accepted += counters.accepted - accepted
        times = live.times
        if times.first is None:
            times.first, live.answer.prompt_logprobs = round.began, sequence.prompt_logprobs
        else:
            self.tally.between_tokens.add((round.began - times.latest) / len(emissions), len(emissions))
        times.latest = round.began

    def _last(self, live: Live, sequence: Running) -> Ended | Exception:
        """How it ended; its memory is free afterwards."""
        reason, times = "error", live.times
        try:
            if sequence.error is not None:
                check_device(self.engine.pool.device, sequence.error)
                raise sequence.error
            tail = live.work.sink.flush()
            response = self.model.response(sequence, "".join([*live.texts, tail]))
            reason = response.finish_reason
            return Ended(
                reason=reason,
                tail=tail,
                response=response,
                stop=sequence.stop,
                queue_seconds=(times.begun or times.submitted) - times.submitted,
                first_token_seconds=(times.first or times.submitted) - times.submitted,
            )
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - it is this answer's alone
            return client_error(error)
        finally:
            self.release(live, reason)

    def _hand_over(self, batch: list[HandOver]) -> None:
        """One call for each event loop that waits for any of it: there is one, but where tests have more."""
        loops: dict[asyncio.AbstractEventLoop, list[HandOver]] = {}
        for entry in batch:
            loops.setdefault(entry[0].loop, []).append(entry)
        for loop, entries in loops.items():
            try:
                loop.call_soon_threadsafe(hand_out, entries)
            except RuntimeError:  # it is closed: nobody reads any more
                for live in [live for live in self.lives.values() if live.answer.loop is loop]:
                    self.release(live)
                    self._forget(live.answer)


class DeviceLost(Exception):
    """Nothing will run on it any more, whoever asks."""


def check_device(device: torch.device, error: Exception) -> None:
    """After an error that was not foreseen: a GPU may be lost for this process, and then no request can be served."""
    if device.type != "cuda" or isinstance(error, ForerunError | torch.OutOfMemoryError):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as gone:
        raise DeviceLost(str(gone)) from error


def hand_out(entries: list[HandOver]) -> None:
    """On the event loop."""
    for answer, emissions, last in entries:
        answer.give(emissions, last)


def client_error(error: Exception) -> Exception:
    """What a client may know of it. Lines of our own say what to do; others may name files and addresses."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConstraintStuck):
        return ApiError(400, str(error), param="response_format", code="grammar_too_complex")
    if isinstance(error, RowError | ForerunError):
        ruled_out = isinstance(error, RowError) and "ruled out" in str(error)
        return ApiError(400 if ruled_out else 500, str(error), code="generation_failed")
    log.error("a request failed", exc_info=error)
    if out_of_memory(error):
        return ApiError(503, "out of memory: send a shorter prompt, or try again later", code="out_of_memory")
    return ApiError(500, f"the engine failed on this request ({type(error).__name__})", code="generation_failed")
