"""One choice of an answer: rounds of tokens in, deltas of reasoning, content and tool calls out."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass

from forerun.engine.sequence import Emission, Logprob, TextSink
from forerun.serve.chat_events import Delta, Finished, PromptProgress, TokenInfo, ToolCallDelta
from forerun.serve.engine_client import Answer, Ended, PromptRead
from forerun.serve.errors import ApiError
from forerun.serve.parsing.pieces import AnswerParser, CallEnd, CallStart, Content, Piece, Reasoning
from forerun.text.answer import AnswerText
from forerun.text.token_bytes import TokenBytes

SOURCES = {"": "model", "model": "draft model"}  # clients know the model by that name, not the smaller one that drafts
Saying = tuple[Piece, list[str], list[TokenInfo]]  # of neighbouring pieces: the first, all their texts, their tokens


@dataclass(slots=True)
class AnswerProgress:
    """How far an answer has come."""

    tokens: int = 0
    accepted: int = 0  # of them, that were drafted
    rounds: int = 0
    first: float | None = None  # when the first of them came
    latest: float = 0.0

    def add(self, emissions: Sequence[Emission]) -> None:
        """What came just now."""
        self.latest = time.perf_counter()
        self.first = self.latest if self.first is None else self.first
        self.tokens += len(emissions)
        self.accepted += sum(emission.from_draft for emission in emissions)
        self.rounds = emissions[-1].round

    @property
    def tokens_per_second(self) -> float:
        took = 0.0 if self.first is None else self.latest - self.first
        return (self.tokens - 1) / took if took else 0.0


class Choice:
    """Reads one answer token by token, so that nothing depends on how rounds cut it."""

    def __init__(
        self,
        index: int,
        answer: Answer,
        sink: TextSink,
        parser: AnswerParser,
        token_bytes: TokenBytes,
        stop_ids: Collection[int] = (),
        *,
        silent: bool = False,
    ) -> None:
        """`stop_ids`: those that the request names itself; the model's own end is no news.

        `silent`: whatever the model says is left out.
        """
        assert isinstance(sink, AnswerText), "it knows which stop string ended the text"
        self.answer, self._sink, self._stop_ids, self._silenced = answer, sink, stop_ids, silent
        self._index, self._parser, self._token_bytes = index, parser, token_bytes
        self._calls = 0
        self._arguments: list[str] = []  # of the last call
        self._silent: list[TokenInfo] = []  # tokens since the last piece
        self.reasoning_tokens = 0
        self.ended: Ended | None = None
        self.progress, self.finish = AnswerProgress(), ""

    async def events(self) -> AsyncGenerator[PromptProgress | Delta | Finished, None]:
        """What it says, and that it is over."""
        told = False
        async for item in self.answer:
            if isinstance(item, PromptRead):
                if not told:
                    yield PromptProgress(
                        self._index, item.total, item.cached, 0.0, item.cached
                    )  # as llama.cpp tells it
                told = True
                yield PromptProgress(self._index, item.total, item.read, item.seconds, item.cached)
                continue
            if not isinstance(item, Ended):
                for delta in () if self._silenced else self._read(item):
                    yield delta
                continue
            self.ended = item
            if self._silenced and item.reason != "cancelled":
                self.finish = "length"
                yield Finished(self._index, "length")
                return
            for delta in self._tail(item.tail, cut=item.reason == "length"):
                yield delta
            if item.reason == "cancelled":
                break
            finished = self._finished(item)
            self.finish = finished.reason
            yield finished
            return
        raise ApiError(503, "The answer was stopped before its end.")

    def _read(self, emissions: Sequence[Emission]) -> Iterator[Delta]:
        """What one round said."""
        said: list[Saying] = []
        self.progress.add(emissions)
        for emission in emissions:
            self._silent.append(self._info(emission))
            self._add(said, self._parser.push(emission.text))
        return filter(None, map(self._delta, said))

    def _tail(self, tail: str, *, cut: bool) -> Iterator[Delta]:
        """What was held back."""
        said: list[Saying] = []
        self._add(said, self._parser.push(tail) + self._parser.finish(cut=cut))
        yield from filter(None, map(self._delta, said))
        if self._silent:
            yield Delta(self._index, tokens=self._silent)

    def _finished(self, ended: Ended) -> Finished:
        """Why it ended, and by which stop of the request."""
        if ended.reason == "length":
            return Finished(self._index, "length")
        found = self._sink.stop
        if found is not None:
            return Finished(self._index, "tool_calls" if self._calls and self._is_whole_call() else "stop", found)
        named = ended.stop if ended.stop in self._stop_ids else None
        return Finished(self._index, "tool_calls" if self._calls else "stop", named)

    def _is_whole_call(self) -> bool:
        """Did a stop string leave the last call its arguments? A client would make the call with what is left."""
        try:
            json.loads("".join(self._arguments))
        except ValueError:
            return False
        return True

    def _add(self, said: list[Saying], pieces: Sequence[Piece]) -> None:
        """A token belongs to the first piece that came with it or after it; neighbours of a kind become one."""
        for piece in pieces:
            tokens, self._silent = self._silent, []
            if isinstance(piece, Reasoning):
                self.reasoning_tokens += len(tokens)
            if isinstance(piece, CallStart | CallEnd):
                said.append((piece, [], tokens))
            elif said and type(said[-1][0]) is type(piece):
                said[-1][1].append(piece.text)
                said[-1][2].extend(tokens)
            else:
                said.append((piece, [piece.text], tokens))

    def _delta(self, saying: Saying) -> Delta | None:
        piece, texts, tokens = saying
        match piece:
            case Content():
                return Delta(self._index, content="".join(texts), tokens=tokens)
            case Reasoning():
                return Delta(self._index, reasoning="".join(texts), tokens=tokens)
            case CallEnd():
                return Delta(self._index, tokens=tokens) if tokens else None
            case CallStart():
                call = ToolCallDelta(self._calls, f"call_{secrets.token_hex(12)}", piece.name)
                self._calls += 1
                self._arguments = []
            case _:
                call = ToolCallDelta(self._calls - 1, arguments="".join(texts))
                self._arguments.append(call.arguments)
        return Delta(self._index, tool_call=call, tokens=tokens)

    def _info(self, emission: Emission) -> TokenInfo:
        text, data = self._token_bytes.of(emission.token)
        arm, logprob = SOURCES.get(emission.arm, emission.arm), emission.logprob
        if logprob is None:
            return TokenInfo(emission.token, text, data, arm, emission.round)
        top = likeliest(logprob, self._token_bytes)
        return TokenInfo(emission.token, text, data, arm, emission.round, logprob.value, top)


def likeliest(logprob: Logprob, token_bytes: TokenBytes) -> list[tuple[int, str, bytes, float]]:
    """The likeliest tokens with their texts."""
    return [(token, *token_bytes.of(token), value) for token, value in logprob.top]
