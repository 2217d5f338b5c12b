"""A loaded model: options in, chunks of text out. A thin layer over the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from forerun import __version__
from forerun.cache.prefix_file import PrefixFile
from forerun.device import Machine, running_memory
from forerun.engine.engine import Engine
from forerun.engine.interrupts import interrupts_held
from forerun.engine.probe import ProbeResult
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence as Running
from forerun.engine.sequence import Status
from forerun.engine.warmup import warm_up
from forerun.errors import ForerunError
from forerun.media.messages import split_prompt
from forerun.media.parts import MediaReader
from forerun.media.reading import check_no_places, checked_reader
from forerun.options import GenerationOptions, whole_number
from forerun.policy.cost_file import CostFile
from forerun.policy.costs import CostTable
from forerun.policy.kinds import kind_of
from forerun.progress import NullProgress, Progress
from forerun.proof import Decoded, Proof, plain_request, prove
from forerun.response import Chunk, Response, Rollout
from forerun.rollouts import generate_tokens, update_weights
from forerun.sample.language import language_bias
from forerun.text.answer import AnswerText
from forerun.text.chat import encode_prompt
from forerun.text.content import text_of

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

WORTH_MEASURING = 32  # tokens of an answer before which it does not pay to measure the drafters first


@dataclass(slots=True, eq=False, repr=False)
class LanguageModel:
    """What `forerun.load` returns. Use it with `forerun.generate` and `forerun.stream`."""

    engine: Engine
    tokenizer: Any
    stop_ids: frozenset[int]
    machine: Machine
    probe: ProbeResult
    load_seconds: float
    name: str = ""  # as it was asked for; of a folder or file the last part
    # What generation_config.json says: values for options of the same names where a request has none.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # about the way its weights are read
    head_warnings: list[str] = field(
        default_factory=list
    )  # for requests that leave the drafter to forerun, or ask for mtp
    cost_file: CostFile | None = None  # where what rounds cost is kept for the next run
    prefix_file: PrefixFile | None = None  # where the prefix cache is kept for the next run
    drafter_labels: dict[str, str] = field(default_factory=dict)  # what each drafter is, in a few words
    media: MediaReader | None = None  # None: it reads text only

    def __repr__(self) -> str:
        """One line: a notebook shows what stands last in a cell."""
        family, machine = self.engine.model.config.family, self.machine
        return f"<LanguageModel {self.name}: {family}, {machine.describe()} on {machine.device}>"

    def start(self, prompt: Prompt, *, progress: Progress | None = None, **given: Any) -> Generation:
        """Queue a request; `given` are `GenerationOptions`."""
        options = GenerationOptions.of(given)
        sampling = options.sampling(language_bias(self.tokenizer, options.lang_bias) if options.lang_bias else None)
        sampling.check_vocabulary(self.engine.vocab)
        templated = bool(self.tokenizer.chat_template) and not options.raw
        prompt, parts = split_prompt(prompt, options.media, templated=templated)
        reader = checked_reader(self.name, self.media, parts) if parts else None
        tokens = encode_prompt(self.tokenizer, prompt, options.system, options.raw)
        if reader is None:
            check_no_places(self.media, tokens)
        # The kind of work is guessed before placeholders are repeated: they would look like a text that repeats itself.
        kind = kind_of(tokens, self._text(prompt, tokens)) if options.draft == "auto" else ""
        read = reader.read(tokens, parts) if reader is not None else None
        tokens = tokens if read is None else read.ids
        draft = options.draft
        request = Request(
            prompt=tuple(tokens),
            sampling=sampling,
            max_tokens=options.max_tokens,
            stop_strings=options.stops,
            stop_ids=self.stop_ids,
            draft=draft,
            draft_tokens=None if options.draft_tokens == "auto" else options.draft_tokens,
            accept=options.accept,
            kind=kind,
            media=None if read is None else read.media,
        )
        if draft == "auto" and (options.max_tokens is None or options.max_tokens >= WORTH_MEASURING):
            with running_memory():
                warm_up(self.engine, sampling.filtered, progress or NullProgress())
        text = AnswerText(self.tokenizer, tokens, options.stops)
        with interrupts_held():  # nobody else would release it
            sequence = self.engine.submit(request, text)
            return Generation(self, sequence, text, progress or NullProgress(), request if options.prove else None)

    def generate_tokens(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        n: int = 1,
        logprobs: bool = True,
        stop_ids: Sequence[int] | None = None,
        **given: Any,
    ) -> list[Rollout]:
        """Answers to one prompt of token ids or to several, `n` to each, all side by side, as tokens.

        `given` are the `GenerationOptions` of sampling and speculation. Drafts change neither tokens nor log
        probabilities. `stop_ids`: what ends an answer, in place of the model's own; an empty list: only `max_tokens`.
        """
        return generate_tokens(self, ids, n, logprobs, stop_ids, **given)

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors by the names they have in the model's files; they are packed as loading packs them.

        No answer may be under way. If anything is wrong, nothing is changed. CPU only so far.
        """
        update_weights(self, tensors)

    def _text(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """What a prompt says, in whatever form it came; `tokens` are its ids."""
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], Mapping):
            return "\n".join(text_of(message["content"]) for message in prompt if isinstance(message, Mapping))
        return str(self.tokenizer.decode(tokens))

    def response(self, sequence: Running, text: str) -> Response:
        """What a sequence has given so far, and what it took."""
        answer, counters = sequence.answer, sequence.counters
        # The first token comes out of the prefill; decoding gave the rest, and an end token that nobody sees.
        decoded = max(0, len(answer) - 1) + (sequence.stop is not None and bool(counters.rounds))
        return Response(
            text=text,
            tokens=answer,
            finish_reason=sequence.finish_reason or "cancelled",
            prompt_tokens=sequence.prompt_length,
            completion_tokens=len(answer),
            rounds=counters.rounds,
            drafted=counters.drafted,
            accepted=counters.accepted,
            seconds={
                "load": self.load_seconds,
                "prefill": counters.prefill_seconds,
                "decode": counters.decode_seconds,
                "draft": counters.draft_seconds,
                "verify": counters.decode_seconds - counters.draft_seconds,
            },
            tokens_per_second=decoded / counters.decode_seconds if counters.decode_seconds else 0.0,
            draft=drafting_arm(sequence),
            guaranteed=self.probe.guaranteed and sequence.request.same_tokens,
            seed=sequence.request.sampling.seed,
            arms={arm: replace(use) for arm, use in counters.arms.items()},
            per_position=[list(pair) for pair in counters.per_position],
            seconds_saved=seconds_saved(sequence, self.engine.costs),
            warnings=[
                *self.notes,
                *(self.head_warnings if sequence.request.draft in ("auto", "mtp") else ()),
                *sequence.warnings,
            ],
            accept=sequence.request.accept,
            cached_tokens=counters.cached,
        )

    def close(self) -> None:
        """Write the file that keeps the prefix cache, if there is one. What is read later is not kept any more."""
        with interrupts_held(), self.engine.owner:
            file, self.prefix_file = self.prefix_file, None
            if file is not None:
                self.engine.settle()
                file.write(self.engine.pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keep_costs(self) -> None:
        """Leave what was learned about this machine for the next run."""
        if self.cost_file is not None and self.engine.costs.known:
            self.cost_file.write(self.engine.costs.proportions())


class Generation:
    """One answer in the making: iterate over it for chunks.

    Stop iterating and come back later: it goes on where it was. Several generations advance together. `close` (or a
    `with` block) frees its memory, as does dropping the last reference to it.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequence: Running,
        sink: AnswerText,
        progress: Progress,
        to_prove: Request | None = None,
    ) -> None:
        """`to_prove`: the request, where the answer is to be decoded again at its end."""
        self.model, self.sequence, self._sink, self._progress = model, sequence, sink, progress
        self._to_prove = to_prove
        self._proof: Proof | None = None
        self._text: list[str] = []
        self._ended = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        sequence = self.sequence
        while not sequence.emissions:
            if sequence.status is Status.FINISHED:
                return self._last()
            self._advance()
        emission = sequence.emissions[0]
        chunk = Chunk(emission.text, emission.token, emission.from_draft, arm=emission.arm)
        with interrupts_held():
            self._text.append(emission.text)
            sequence.emissions.popleft()
        return chunk

    def ready_chunks(self) -> Iterator[Chunk]:
        """Chunks that are there already: who interrupts a round finds what it gave."""
        while self.sequence.emissions:
            yield next(self)

    def _advance(self) -> None:
        engine, sequence = self.model.engine, self.sequence
        engine.unpause(sequence)
        reads = sequence.status in (Status.WAITING, Status.PREFILL)
        if not reads or sequence.prompt_length <= engine.chunk:
            self._step()
            return
        with self._progress.task("reading the prompt", sequence.prompt_length) as task:
            while sequence.status in (Status.WAITING, Status.PREFILL):
                before = sequence.cache.length
                self._step()
                task.advance(sequence.cache.length - before)

    def _step(self) -> None:
        """One round of everybody, unless another thread has just run the one we wait for."""
        with interrupts_held(), self.model.engine.owner:
            if not self.sequence.emissions and self.sequence.status is not Status.FINISHED:
                self.model.engine.step()
                if self.model.engine.scheduler.idle and self.sequence.status is Status.WAITING:
                    raise ForerunError(
                        "there is no memory left for this answer: close others that are paused, or let them go on"
                    )

    def _last(self) -> Chunk:
        if self._ended:
            raise StopIteration
        if self.sequence.error is not None:
            self._ended = True
            self.close()
            with running_memory():
                raise self.sequence.error
        if self._to_prove is not None and self.sequence.finish_reason != "cancelled":
            self._proof = self._decode_again(self._to_prove)
        with interrupts_held():
            return self._end()

    def _decode_again(self, request: Request) -> Proof:
        """Without drafts. Where that fails, the answer is there all the same."""
        model, limit = self.model, self.sequence.limit - len(request.prompt)  # `extend` has moved it
        request = replace(request, max_tokens=limit)
        sink = AnswerText(model.tokenizer, request.prompt, request.stop_strings)
        try:
            with interrupts_held():
                again = Generation(model, model.engine.submit(plain_request(request), sink), sink, self._progress)
            with again:
                for _ in again:
                    pass
        except ForerunError as error:
            return Proof(None, error=str(error))
        about = f"forerun {__version__}, {model.name}, {model.machine.describe()} on {model.machine.device}"
        given, plain = (
            Decoded(s.answer, s.stop, s.finish_reason or "cancelled") for s in (self.sequence, again.sequence)
        )
        return prove([request], [given], [plain], lambda token: str(model.tokenizer.decode([token])), about)

    def _end(self) -> Chunk:
        self._ended = True
        tail = self._sink.flush() if self.sequence.finish_reason != "cancelled" else ""
        self._text.append(tail)
        self.model.keep_costs()
        response = self.response()
        return Chunk(tail, None, False, self.sequence.finish_reason, response)

    def response(self) -> Response:
        """The answer so far and what it took."""
        text = [*self._text, *(emission.text for emission in self.sequence.emissions)]
        return replace(self.model.response(self.sequence, "".join(text)), proof=self._proof)

    def extend(self, max_tokens: int) -> None:
        """Let an answer that was cut off go on for `max_tokens` more, as if it had never stopped.

        The text of its last chunk was held back until then: it is taken back, and comes again with the next tokens.
        """
        more = whole_number("max_tokens", max_tokens)
        if more is None or more < 1:
            raise ForerunError(f"max_tokens must be a whole number from 1 up, not {max_tokens!r}")
        with interrupts_held():
            self.model.engine.resume(self.sequence, more)
            if self._ended:
                self._text.pop()
            self._ended, self._proof = False, None

    def cancel(self) -> None:
        """Stop here; the next chunk is the last. `extend` takes it up again."""
        self.model.engine.cancel(self.sequence)

    def pause(self) -> None:
        """Leave this answer out while others go on; iterating takes it up again."""
        self.model.engine.pause(self.sequence)

    def close(self) -> None:
        """Free the memory it holds. It cannot be continued afterwards."""
        self.model.engine.release(self.sequence)

    def __del__(self) -> None:
        engine, sequence = self.model.engine, self.sequence
        engine.owner.post(lambda: engine.release(sequence))  # a finaliser may run in the middle of a round

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def drafting_arm(sequence: Running) -> str:
    """The arm that drafted most, or the one that would have; "off" when there is none."""
    drafted = {arm: use.rounds for arm, use in sequence.counters.arms.items() if arm != "plain"}
    if drafted:
        return max(drafted, key=lambda arm: drafted[arm])
    return sequence.arms[0] if sequence.arms else "off"


def seconds_saved(sequence: Running, costs: CostTable) -> float | None:
    """Against plain decoding, by its rounds in this process; None where nothing was drafted or none was measured."""
    return sequence.seconds_saved if sequence.arms and costs.known else None


def collect(generation: Generation) -> Response:
    """Run a generation to its end and free it."""
    with generation:
        for chunk in generation:
            if chunk.response is not None:
                return chunk.response
    raise ForerunError("the generation was closed before it ended")
