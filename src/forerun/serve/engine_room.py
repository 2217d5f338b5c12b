"""The half of the local engine that lives on the engine's thread: it submits, releases and hands over what came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forerun.device import out_of_memory
from forerun.engine.sequence import Emission, Status
from forerun.engine.sequence import Sequence as Running
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.memory import return_freed_memory
from forerun.sample.constraint import ConstraintStuck
from forerun.sample.row import RowError
from forerun.serve.engine_client import Ended, PromptRead
from forerun.serve.errors import ApiError
from forerun.serve.local_answer import LocalAnswer
from forerun.serve.tally import Bin, Tally

log = logging.getLogger("forerun")
TIDY = 10.0  # seconds of rounds between two times that freed memory goes back
HandOver = tuple[LocalAnswer, Sequence[Emission], Ended | Exception | None, PromptRead | None]


class EngineRoom:
    """Runs on the engine's thread; other threads may look at `answers`, `blocked` and `tally`."""

    def __init__(self, model: LanguageModel, tally: Tally, forget: Callable[[LocalAnswer], object]) -> None:
        """`forget`: told of answers whose event loop is gone."""
        self.model, self.engine, self.tally, self._forget = model, model.engine, tally, forget
        self.answers: dict[int, LocalAnswer] = {}  # by sequence
        self.blocked = False  # does anybody wait for room?
        self._tidied = time.perf_counter()

    def submit(self, answers: Sequence[LocalAnswer]) -> None:
        """All choices of a request, or none."""
        try:
            for answer in answers:
                work = answer.work
                answer.sequence = self.engine.submit(work.request, work.sink, work.constraint)
                if work.request.media is not None:  # the sequence gives them up when its prompt has been read
                    answer.work = replace(work, request=replace(work.request, media=None))
                self.answers[answer.sequence.id] = answer
        except Exception as error:  # noqa: BLE001 - whatever it is, it is theirs
            for answer in answers:
                self.release(answer)
            failure = client_error(error, answers[0].work.request.name)
            self._hand_over([(answer, (), failure, None) for answer in answers])

    def release(self, answer: LocalAnswer, reason: str = "abort") -> None:
        """Its reader wants no more, or it has ended: free all it holds. Safe any number of times."""
        sequence = answer.sequence
        if sequence is not None and self.answers.get(sequence.id) is answer:
            self.engine.release(sequence)
            answer.times.ended = time.perf_counter()
            self.tally.ended(self.answers, sequence)
            self.tally.finished(reason, answer.times, sequence)

    def hold(self, answer: LocalAnswer, held: bool) -> None:
        """Leave it out of the rounds, or take it in again."""
        if answer.sequence is not None and answer.sequence.id in self.answers:
            (self.engine.pause if held else self.engine.unpause)(answer.sequence)

    def delivered(self) -> None:
        """After a round: everything it gave goes over to the event loop in one call."""
        now = time.perf_counter()
        batch: list[HandOver] = []
        round = Bin(now)
        for answer in list(self.answers.values()):
            sequence = answer.sequence
            assert sequence is not None
            progress = self._begin(answer, sequence, round) if answer.times.first is None else None
            emissions = list(sequence.emissions)
            if emissions:
                sequence.emissions.clear()
                self._count(answer, sequence, emissions, round)
            last = self._last(answer, sequence) if sequence.status is Status.FINISHED else None
            if emissions or last is not None or progress is not None:
                batch.append((answer, emissions, last, progress))
        self.blocked = bool(self.engine.scheduler.waiting) and not self.engine.scheduler.follows
        self.tally.round(round)
        self._hand_over(batch)
        if now - self._tidied > TIDY:
            return_freed_memory()
            self._tidied = time.perf_counter()

    def _begin(self, answer: LocalAnswer, sequence: Running, round: Bin) -> PromptRead | None:
        """How far its prompt has been read; a `PromptRead` where its request asks for that and there is more."""
        if answer.times.begun is None:
            answer.times.begun = sequence.admitted
        cached = sequence.counters.cached
        answer.read = max(answer.read, cached)
        read = min(max(answer.read, sequence.cache.length), sequence.prompt_length)
        more, answer.read = read - answer.read, read
        round.read += more
        if not more or not answer.work.progress:
            return None
        return PromptRead(read, sequence.prompt_length, round.began - (answer.times.begun or round.began), cached)

    def _count(self, answer: LocalAnswer, sequence: Running, emissions: list[Emission], round: Bin) -> None:
        answer.texts += [emission.text for emission in emissions]
        round.tokens += len(emissions)
        counters, (rounds, drafted, accepted) = sequence.counters, answer.counted
        answer.counted = (counters.rounds, counters.drafted, counters.accepted)
        round.rounds += counters.rounds - rounds
        round.drafted += counters.drafted - drafted
        round.accepted += counters.accepted - accepted
        times = answer.times
        if times.first is None:
            times.first, answer.prompt_logprobs = round.began, sequence.prompt_logprobs
        else:
            self.tally.between_tokens.add((round.began - times.latest) / len(emissions), len(emissions))
        times.latest = round.began

    def _last(self, answer: LocalAnswer, sequence: Running) -> Ended | Exception:
        """How it ended; its memory is free afterwards."""
        reason, times = "error", answer.times
        try:
            if sequence.error is not None:
                check_device(self.engine.pool.device, sequence.error)
                raise sequence.error
            tail = answer.work.sink.flush()
            response = self.model.response(sequence, "".join([*answer.texts, tail]))
            reason = response.finish_reason
            return Ended(
                reason=reason,
                tail=tail,
                response=response,
                stop=sequence.stop,
                stop_logprob=sequence.stop_logprob,
                queue_seconds=(times.begun or times.submitted) - times.submitted,
                first_token_seconds=(times.first or times.submitted) - times.submitted,
            )
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - it is this answer's alone
            return client_error(error, sequence.request.name)
        finally:
            self.release(answer, reason)

    def _hand_over(self, batch: list[HandOver]) -> None:
        """One call for each event loop that waits for any of it: there is one, but where tests have more."""
        loops: dict[asyncio.AbstractEventLoop, list[HandOver]] = {}
        for entry in batch:
            loops.setdefault(entry[0].loop, []).append(entry)
        for loop, entries in loops.items():
            try:
                loop.call_soon_threadsafe(hand_out, entries)
            except RuntimeError:  # it is closed: nobody reads any more
                for answer in [answer for answer in self.answers.values() if answer.loop is loop]:
                    self.release(answer)
                    self._forget(answer)


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
    for answer, emissions, last, progress in entries:
        answer.give(emissions, last, progress)


def client_error(error: Exception, request: str = "") -> Exception:
    """What a client may know of it. Lines of our own say what to do; others may name files and addresses."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConstraintStuck):
        return ApiError(400, str(error), param="response_format", code="grammar_too_complex")
    if isinstance(error, RowError | ForerunError):
        ruled_out = isinstance(error, RowError) and "ruled out" in str(error)
        return ApiError(400 if ruled_out else 500, str(error), code="generation_failed")
    log.error("a request failed", exc_info=error, extra={"request": request})
    if out_of_memory(error):
        return ApiError(503, "out of memory: send a shorter prompt, or try again later", code="out_of_memory")
    return ApiError(500, f"the engine failed on this request ({type(error).__name__})", code="generation_failed")
