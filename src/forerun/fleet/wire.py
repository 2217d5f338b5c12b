"""What goes between the front and a replica: work as bytes, and the items of its answers.

A front has no model and a replica no HTTP, but both have the tokenizer. So text is made at the front, out of tokens; a
replica makes it only where stop strings are to be found. A constraint goes as it is before its first token; the
vocabulary it is written for, which takes a second to build, stays where it is: each side has its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.engine.request import Request
from forerun.engine.sequence import Emission, Logprob, TextSink
from forerun.sample.constraint import Constraint
from forerun.sample.grammar import GrammarVocabulary
from forerun.serve.engine_client import Ended, PromptRead, Work
from forerun.text.answer import AnswerText, NoText

VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first item of a request: its answers are queued."""


@dataclass(frozen=True, slots=True)
class ChoiceEmissions:
    """What one choice said, in one or several rounds."""

    choice: int
    emissions: Sequence[Emission]  # without text
    prompt_logprobs: Sequence[Logprob] = ()  # with the first item that has any


@dataclass(frozen=True, slots=True)
class ChoicePromptRead:
    """How much of its prompt one choice has read, where that was asked for."""

    choice: int
    progress: PromptRead


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice has ended, by itself or by an error of its own."""

    choice: int
    ended: Ended | Exception


class OtherModel(Exception):
    """The work was made for another model than this replica has: an update is under way."""


# An exception: the request as a whole was refused.
Item = Accepted | ChoicePromptRead | ChoiceEmissions | ChoiceEnded | Exception


@dataclass(frozen=True, slots=True)
class Shipped:
    """`Work` without what cannot travel."""

    request: Request
    shown: frozenset[str]
    constraint: Constraint | None
    progress: bool


class _Packer(pickle.Pickler):
    def persistent_id(self, found: Any) -> str | None:
        return VOCABULARY if isinstance(found, GrammarVocabulary) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        super().__init__(io.BytesIO(data))
        self._vocabulary = vocabulary

    def persistent_load(self, name: Any) -> GrammarVocabulary:
        if name != VOCABULARY:
            raise pickle.UnpicklingError(f"nothing here is called {name!r}")
        return self._vocabulary()


def pack(work: Sequence[Work]) -> bytes:
    """The choices of one request. None of them has begun."""
    shipped = [Shipped(one.request, shown_by(one.sink), one.constraint, one.progress) for one in work]
    data = io.BytesIO()
    _Packer(data, pickle.HIGHEST_PROTOCOL).dump(shipped)
    return data.getvalue()


def shown_by(sink: TextSink) -> frozenset[str]:
    """Special tokens that are text in this answer."""
    return sink.shown if isinstance(sink, AnswerText) else frozenset()


def unpack(data: bytes, tokenizer: Any, vocabulary: Callable[[], GrammarVocabulary]) -> list[Work]:
    """The same on a replica. Grammars are compiled again, which takes up to some hundred milliseconds."""
    found: list[Shipped] = _Unpacker(data, vocabulary).load()
    return [Work(one.request, _sink(one, tokenizer), one.constraint, one.progress) for one in found]


def _sink(one: Shipped, tokenizer: Any) -> TextSink:
    request = one.request
    return AnswerText(tokenizer, request.prompt, request.stop_strings, one.shown) if request.stop_strings else NoText()
