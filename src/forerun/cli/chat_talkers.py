"""Who answers in `forerun chat`: the protocol, and an engine in this process. `chat_remote` has a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from forerun.cli.generation_flags import check_options
from forerun.media.parts import Kind
from forerun.media.reading import check_kind
from forerun.options import GenerationOptions
from forerun.serve.parsing.pieces import AnswerParser, Content, Piece, Reasoning
from forerun.text.messages import Message

if TYPE_CHECKING:
    from forerun.language_model import Generation, LanguageModel
    from forerun.progress import Progress
    from forerun.response import Chunk


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """Some text of an answer."""

    text: str
    arm: str = ""  # who drafted it; empty: the model itself chose it
    thought: bool = False  # not part of what it says


@dataclass(frozen=True, slots=True)
class ReplySummary:
    """What an answer took. None: not known, as of an answer that was stopped on a server."""

    tokens: int
    tokens_per_second: float | None = None
    tokens_per_round: float | None = None
    seconds_saved: float | None = None
    seed: int | None = None
    guaranteed: bool | None = None
    length: bool = False  # the limit on tokens ended it
    warnings: Sequence[str] = field(default_factory=list)
    proof: str | None = None  # in a line, where it was asked for
    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of them


def saved_seconds(seconds: float) -> str:
    """`0.8 s saved`, or lost."""
    return f"{abs(seconds):.1f} s {'saved' if round(seconds, 1) >= 0 else 'lost'}"


class Reply(Protocol):
    """One answer: iterate for its pieces."""

    def __iter__(self) -> Iterator[ReplyPiece]: ...

    def rest(self) -> Iterator[ReplyPiece]:
        """After an interruption: pieces that are there already."""
        ...

    def summary(self) -> ReplySummary:
        """So far."""
        ...

    def close(self) -> None:
        """Stop it."""
        ...


class Talker(Protocol):
    """Answers conversations."""

    name: str
    defaults: Mapping[str, float]  # of options that are not set

    def check(self, options: GenerationOptions) -> None:
        """`ForerunError` for what it cannot do."""
        ...

    def check_media(self, kind: Kind) -> None:
        """`ForerunError` for what it is known not to see or hear."""
        ...

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> Reply: ...


class LocalTalker:
    """The engine of this process."""

    def __init__(self, model: LanguageModel, name: str, progress: Progress) -> None:
        from forerun.serve.parsing.formats import format_of

        self.name, self._model, self._progress = name, model, progress
        self.defaults = model.generation_defaults
        self._format = format_of(model.tokenizer)

    def check(self, options: GenerationOptions) -> None:
        check_options(options)

    def check_media(self, kind: Kind) -> None:
        check_kind(self.name, self._model.media, kind)

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> LocalReply:
        options = replace(options.with_defaults(self.defaults), system=None, raw=False)  # system is a message here
        generation = self._model.start(list(messages), progress=self._progress, **options.to_dict())
        return LocalReply(generation, self._parser(messages))

    def _parser(self, messages: Sequence[Message]) -> AnswerParser:
        """Tells thoughts from what is said; nothing is a tool call here."""
        from forerun.serve.parsing.make import make_parser
        from forerun.text.chat import encode_chat
        from forerun.text.content import text_of

        words = [{**message, "content": text_of(message["content"])} for message in messages]
        opened = encode_chat(self._model.tokenizer, words).thinking_open
        return make_parser(self._format, (), thinking_open=opened)


class LocalReply:
    """A `Generation`, piece by piece."""

    def __init__(self, generation: Generation, parser: AnswerParser) -> None:
        self._generation, self._parser = generation, parser

    def __iter__(self) -> Iterator[ReplyPiece]:
        return self._pieces(self._generation)

    def rest(self) -> Iterator[ReplyPiece]:
        return self._pieces(self._generation.ready_chunks())

    def _pieces(self, chunks: Iterator[Chunk]) -> Iterator[ReplyPiece]:
        arm = ""
        for chunk in chunks:
            arm = chunk.arm
            yield from _shown(self._parser.push(chunk.text), arm)
        yield from _shown(self._parser.finish(), arm)

    def summary(self) -> ReplySummary:
        response = self._generation.response()
        return ReplySummary(
            tokens=response.completion_tokens,
            tokens_per_second=response.tokens_per_second,
            tokens_per_round=response.tokens_per_round if response.rounds else None,
            seconds_saved=response.seconds_saved,
            seed=response.seed,
            guaranteed=None if response.accept == "rejection" else response.guaranteed,  # nothing was promised
            length=response.finish_reason == "length",
            warnings=response.warnings,
            proof=None if response.proof is None else response.proof.line(),
            prompt_tokens=response.prompt_tokens,
            cached_tokens=response.cached_tokens,
        )

    def close(self) -> None:
        self._generation.close()


def _shown(pieces: Sequence[Piece], arm: str) -> Iterator[ReplyPiece]:
    """Thoughts and words; a parser without tools knows nothing else."""
    for piece in pieces:
        if isinstance(piece, Content | Reasoning) and piece.text:
            yield ReplyPiece(piece.text, arm, thought=isinstance(piece, Reasoning))
