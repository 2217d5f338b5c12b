"""The half of `forerun bench --load` that drives an engine of this process.

Its rounds run on the event loop, and clients are served between two rounds, as by a server whose other work costs
nothing. Prompts are tokenised beforehand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.bench.load import OFF, Job, TimedAnswer
from forerun.bench.runner import arms_of
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence as Running
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel, collect
from forerun.policy.kinds import kind_of
from forerun.sample.parameters import SamplingParams
from forerun.text.answer import AnswerText
from forerun.text.chat import encode_prompt

WARM_UP_TOKENS = 32  # of an answer that makes a model measure its drafters before it begins


@dataclass(slots=True, eq=False)
class _Asked:
    """An answer under way: when each of its arrivals came, and what is told of its end."""

    sequence: Running
    ended: asyncio.Future[None]
    seen: int = 0  # tokens
    arrivals: list[float] = field(default_factory=list)


class EngineTarget:
    """All arms of a model that is loaded here."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.arms = (OFF, *arms_of(model))
        self.on_cpu = model.machine.device.type == "cpu"
        self._prompts: dict[str, tuple[tuple[int, ...], str]] = {}  # tokens and kind of work, by the job's id
        self._asked: list[_Asked] = []
        self._rounds: asyncio.Task[None] | None = None
        for arm in self.arms:
            collect(model.start("Hello", max_tokens=WARM_UP_TOKENS, draft=arm))

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Tokenise what is new, and refuse what the model cannot be asked."""
        for job in jobs:
            if job.id in self._prompts:
                continue
            try:
                tokens = tuple(encode_prompt(self.model.tokenizer, job.content))
                self._prompts[job.id] = (
                    tokens,
                    kind_of(tokens, "\n".join(message["content"] for message in job.messages)),
                )
                self.model.engine.check(self._request(job, OFF))
            except ForerunError as error:
                raise ForerunError(f"prompt {job.id}: {error}") from error

    def _request(self, job: Job, arm: str) -> Request:
        tokens, kind = self._prompts[job.id]
        return Request(
            prompt=tokens,
            sampling=SamplingParams(temperature=job.temperature, seed=job.seed),
            max_tokens=job.max_tokens,
            stop_ids=self.model.stop_ids,
            draft=arm,
            kind=kind if arm == "auto" else "",
        )

    async def answer(self, job: Job, since: float, arm: str) -> TimedAnswer:
        """Runs along with all others that are under way."""
        engine, request = self.model.engine, self._request(job, arm)
        sink = AnswerText(self.model.tokenizer, request.prompt, ())
        loop = asyncio.get_running_loop()
        asked = _Asked(engine.submit(request, sink), loop.create_future())
        sequence = asked.sequence
        self._asked.append(asked)
        try:
            if self._rounds is None or self._rounds.done():
                self._rounds = loop.create_task(self._run_rounds())
            await asked.ended
        finally:
            if asked in self._asked:
                self._asked.remove(asked)
            engine.release(sequence)
        if sequence.error is not None:
            raise ForerunError(f"prompt {job.id}: {sequence.error}") from sequence.error
        seconds = [after - before for before, after in pairwise([since, *asked.arrivals])]
        counters = sequence.counters
        return TimedAnswer(
            text="".join(emission.text for emission in sequence.emissions) + sink.flush(),
            tokens=asked.seen,
            first=seconds[0] if seconds else time.perf_counter() - since,
            gaps=seconds[1:],
            prompt_rows=len(request.prompt),
            other_rows=counters.rounds + counters.drafted,
        )

    async def _run_rounds(self) -> None:
        """Rounds until no answer is under way; after each, whose answer has ended may ask again before the next."""
        try:
            while self._asked:
                self.model.engine.step()
                now = time.perf_counter()
                for asked in self._asked[:]:
                    count = len(asked.sequence.emissions)
                    if count > asked.seen:
                        asked.seen = count
                        asked.arrivals.append(now)
                    if asked.sequence.finish_reason is not None:
                        self._asked.remove(asked)
                        if not asked.ended.done():
                            asked.ended.set_result(None)
                await asyncio.sleep(0)
            self.model.engine.settle()
        except Exception as error:  # noqa: BLE001 - clients that wait for an answer have to hear of it
            for asked in self._asked:
                if not asked.ended.done():
                    asked.ended.set_exception(error)
