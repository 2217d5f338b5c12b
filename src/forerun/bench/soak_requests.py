"""The requests of a soak test: many kinds, each with the answer it must always get."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.bench.http_client import Address, HttpError
from forerun.bench.http_load import CHAT
from forerun.bench.workloads import load_workloads
from forerun.draft.arms import DRAFT_CHOICES

SHORTEST, LONGEST = 8, 48  # tokens of an answer
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "description": "Keep a note.", "parameters": SCHEMA}}
KINDS: dict[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "nucleus": {"temperature": 1.0, "top_p": 0.9},
    "few": {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "two": {"temperature": 0.9, "n": 2},
    "stops": {"temperature": 0.0, "stop": [".", "\n\n"]},
    "logprobs": {"temperature": 0.5, "logprobs": True, "top_logprobs": 2},
    "json": {
        "temperature": 0.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "tool": {"temperature": 0.0, "tools": [TOOL], "tool_choice": "required"},
}


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request but for who drafts and whether it streams, which must not matter."""

    kind: str
    body: Mapping[str, Any]

    @property
    def room(self) -> int:
        """How much of a cache it takes, about: characters of its prompt, and four for every token of its answer."""
        return len(json.dumps(self.body["messages"])) + 4 * int(self.body["max_completion_tokens"])

    def full_body(self, arm: str, stream: bool) -> dict[str, Any]:
        """As it is sent."""
        more: dict[str, Any] = {"speculative": arm}
        if stream:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.body, **more}


@dataclass(frozen=True, slots=True)
class SoakAnswer:
    """An answer: what each choice said, called and gave for logprobs; and its tokens."""

    choices: tuple[str, ...]
    tokens: int


def make_requests(count: int, seed: int) -> list[SoakRequest]:
    """So many different ones, all kinds in turn, the same for the same seed."""
    dice = random.Random(seed)
    prompts = [prompt for workload in load_workloads() for prompt in workload.prompts]
    requests = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        messages = dice.choice(prompts).messages
        tokens = LONGEST if kind in ("json", "tool") else dice.randint(SHORTEST, LONGEST)
        body = {"messages": messages, "max_completion_tokens": tokens, "seed": number, **KINDS[kind]}
        requests.append(SoakRequest(kind, body))
    return requests


async def answer(
    server: Address, request: SoakRequest, arm: str, stream: bool, give_up: int | None
) -> SoakAnswer | None:
    """What the server says; None when we hang up: after so many events, or at once where nothing streams."""
    body = request.full_body(arm, stream)
    if not stream:
        found = await server.fetch(CHAT, body)
        return SoakAnswer(tuple(_whole(choice) for choice in found["choices"]), found["usage"]["completion_tokens"])
    events = await server.stream(CHAT, body, give_up)
    if events is None:
        return None
    choices: dict[int, _Streamed] = {}
    tokens = 0
    for _, event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], _Streamed()).add(choice)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return SoakAnswer(tuple(choices[index].whole() for index in sorted(choices)), tokens)


async def known_arms(server: Address, request: SoakRequest) -> list[str]:
    """Ways to draft that the model has."""
    return [arm for arm in DRAFT_CHOICES if await _unless_refused(server, request, arm) is not None]


async def references(server: Address, requests: list[SoakRequest]) -> tuple[dict[int, SoakAnswer], set[str]]:
    """Each alone, without drafts and without streaming; and the kinds that the model or the server does not have."""
    found: dict[int, SoakAnswer] = {}
    missing: set[str] = set()
    for number, request in enumerate(requests):
        if request.kind in missing:
            continue
        said = await _unless_refused(server, request, "off")
        if said is None:
            missing.add(request.kind)
        else:
            found[number] = said
    return found, missing


async def _unless_refused(server: Address, request: SoakRequest, arm: str) -> SoakAnswer | None:
    """A whole answer; None: the model or the server does not have what is asked for."""
    try:
        return await answer(server, request, arm, False, None)
    except HttpError as error:
        if error.status != 400:
            raise
        return None


class _Streamed:
    """A choice as it comes."""

    def __init__(self) -> None:
        self.content, self.reasoning, self.reason = "", "", None
        self.calls: dict[int, list[str]] = {}
        self.logprobs: list[Any] = []

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            named = self.calls.setdefault(call["index"], ["", ""])
            named[0] += call["function"].get("name") or ""
            named[1] += call["function"].get("arguments") or ""
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        self.reason = choice.get("finish_reason") or self.reason

    def whole(self) -> str:
        calls = [self.calls[index] for index in sorted(self.calls)]
        return _text(self.content, self.reasoning, calls, self.logprobs, self.reason)


def _whole(choice: Mapping[str, Any]) -> str:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    thought = message.get("reasoning_content") or ""
    return _text(message["content"] or "", thought, calls, logprobs, choice["finish_reason"])


def _text(content: str, thought: str, calls: list[list[str]], logprobs: list[Any], reason: str | None) -> str:
    """All that must be equal, as one text."""
    return json.dumps([content, thought, calls, logprobs, reason])
