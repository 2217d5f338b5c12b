"""Proof on demand: an answer beside what plain decoding gives for the same request, token by token."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from forerun.engine.request import Request
from forerun.sample.parameters import SamplingParams


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one decoding gave."""

    tokens: Sequence[int]  # without the token that ended it
    end: int | None  # that token, if one did
    reason: str  # "stop" or "length"

    def is_cut(self, limit: int | None) -> bool:
        """Did the cache have no room for more of it? Then how long it is says nothing."""
        return self.reason == "length" and (limit is None or len(self.tokens) < limit)


@dataclass(frozen=True, slots=True)
class Proof:
    """Is an answer what plain decoding gives? `choice` to `report` are of the first difference."""

    identical: bool | None  # None: the second decoding failed
    tokens: int = 0  # of all choices, as far as they are the same
    choice: int | None = None
    index: int | None = None
    token: dict[str, Any] | None = None  # id and text; None: the answer ended there
    plain: dict[str, Any] | None = None  # of plain decoding
    report: str | None = None  # the difference, the model and the settings in one line
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: of the difference or the failure only where there is one."""
        facts = asdict(self)
        if self.index is not None:
            return {name: value for name, value in facts.items() if name != "error"}
        return {name: value for name, value in facts.items() if name in ("identical", "tokens") or value is not None}

    def line(self) -> str:
        """In words."""
        if self.identical is None:
            return f"not proved: {self.error}"
        if self.identical:
            return f"proved: {self.tokens} token{'' if self.tokens == 1 else 's'} identical to plain decoding"
        return f"DIFFERENT from plain decoding: {self.report}"


def plain_request(request: Request) -> Request:
    """The same, decoded without drafts and without what others have left in the cache. Log probabilities change no
    token and need not be computed again.
    """
    salt = secrets.token_hex(16)
    return replace(
        request, draft="off", draft_tokens=None, kind="", logprobs=None, prompt_logprobs=False, cache_salt=salt
    )


def prove(
    requests: Sequence[Request],
    answers: Sequence[Decoded],
    plain: Sequence[Decoded],
    text_of: Callable[[int], str],
    about: str,
) -> Proof:
    """Compare all choices of a request; `about`: the model, for the report."""
    same = 0
    for choice, (request, answer, other) in enumerate(zip(requests, answers, plain, strict=True)):
        index = first_difference(answer, other, request.max_tokens)
        if index is None:
            same += min(len(answer.tokens), len(other.tokens))
            continue
        given, expected = (_token(decoded, index, text_of) for decoded in (answer, other))
        report = (
            f"token {index} of choice {choice} is {_named(given)}, plainly {_named(expected)} ({about}, "
            f"{len(request.prompt)} prompt tokens, draft {request.draft}, {_settings(request.sampling)})"
        )
        return Proof(False, same + index, choice, index, given, expected, report)
    return Proof(True, same)


def first_difference(answer: Decoded, plain: Decoded, limit: int | None) -> int | None:
    """Where they part, the end counted as a token; None: they do not. `limit`: on tokens, of the request."""
    given, expected = _with_end(answer), _with_end(plain)
    common = min(len(given), len(expected))
    for index in range(common):
        if given[index] != expected[index]:
            return index
    if len(given) == len(expected):
        return None
    shorter = answer if len(given) == common else plain
    return None if shorter.is_cut(limit) else common


def _with_end(decoded: Decoded) -> list[int]:
    return [*decoded.tokens, *(() if decoded.end is None else (decoded.end,))]


def _token(decoded: Decoded, index: int, text_of: Callable[[int], str]) -> dict[str, Any] | None:
    tokens = _with_end(decoded)
    return {"id": tokens[index], "text": text_of(tokens[index])} if index < len(tokens) else None


def _named(token: dict[str, Any] | None) -> str:
    return "the end" if token is None else f"{token['id']} {token['text']!r}"


def _settings(sampling: SamplingParams) -> str:
    """Whatever is not at its default, and the seed."""
    usual = SamplingParams()
    names = [entry.name for entry in fields(sampling) if entry.init and entry.name not in ("seed", "choice")]
    changed = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(usual, name)}
    parts = [f"seed {sampling.seed}", *(f"{name} {value}" for name, value in changed.items())]
    return ", ".join(parts) if changed else f"{parts[0]}, greedy"
