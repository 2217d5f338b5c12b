"""What a chat template can take, found out by trying, and messages brought into that form.

Templates differ: some want contents as parts, arguments as text or short call ids; some refuse a system message in
mid-conversation, or lose it without a word; some know nothing of tools. Each is probed once with short conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from forerun.errors import ForerunError
from forerun.text.content import MEDIA_KINDS, in_parts, plain, text_after, text_before, text_part
from forerun.text.template import ChatTemplate

_PROBE_SECONDS = 1.0
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # templates know one or the other
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Habits:
    """How messages must look for this template."""

    developer: bool  # it knows the role
    system_first: bool
    system_later: bool  # also in mid-conversation, and where it was
    parts: bool  # contents as lists of parts
    tools: bool  # it shows tools, calls and results
    arguments_as_text: bool = False
    short_ids: bool = False  # nine letters or digits
    media: frozenset[str] = frozenset()  # kinds that it writes placeholders for


def habits_of(source: str, special_tokens: Mapping[str, Any]) -> Habits:
    """Found by rendering; remembered for the next request."""
    return _probed(source, tuple(sorted((name, str(text)) for name, text in special_tokens.items())))


@lru_cache(maxsize=16)
def _probed(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Habits:
    template = ChatTemplate(source, dict(special_tokens))
    alone = [{"role": "user", "content": "PROBE1"}]
    parts = not _shows(template, alone) and _shows(template, _in_parts(alone))

    def shows(messages: Messages, tools: list[dict[str, Any]] | None = None) -> bool:
        return _shows(template, _in_parts(messages) if parts else messages, tools)

    user, assistant = {"role": "user", "content": "PROBE2"}, {"role": "assistant", "content": "PROBE3"}
    first = shows([{"role": "system", "content": "PROBE1"}, user])
    later = first and shows(
        [
            {"role": "system", "content": "PROBE1"},
            *(user, assistant),
            {"role": "system", "content": "PROBE4"},
            {"role": "user", "content": "PROBE5"},
        ]
    )
    known: dict[str, bool] = {"tools": False}
    for as_text, short in ((False, False), (True, False), (False, True), (True, True)):
        if shows(_calling(as_text, short), [_PROBE_TOOL]):
            known = {"tools": True, "arguments_as_text": as_text, "short_ids": short}
            break
    developer = "developer" in source and shows([{"role": "developer", "content": "PROBE1"}, user])
    media = frozenset(kind for kind in MEDIA_KINDS if _places(template, kind))
    return Habits(developer=developer, system_first=first, system_later=later, parts=parts, media=media, **known)


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "PROBE_TOOL",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}},
    },
}


def _calling(as_text: bool, short: bool) -> Messages:
    """A conversation with a call in it. Its marks come in order; the tool's name may stand anywhere."""
    arguments = {"a": "PROBE3"}
    call = {
        "id": "000000001" if short else "call_0123456789abcdef",
        "type": "function",
        "function": {"name": "PROBE2", "arguments": json.dumps(arguments) if as_text else arguments},
    }
    return [
        {"role": "user", "content": "PROBE1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "PROBE4", "tool_call_id": call["id"], "name": "PROBE2"},
    ]


def _shows(template: ChatTemplate, messages: Messages, tools: list[dict[str, Any]] | None = None) -> bool:
    """Are all marks in the prompt, in the order in which they were said, and the tool's name as well?"""
    try:
        rendered = template.render(messages, tools=tools, seconds=_PROBE_SECONDS)
    except ForerunError:
        return False
    position = -1
    for number in sorted(n for n in range(1, 6) if f"PROBE{n}" in json.dumps(messages)):
        position = rendered.find(f"PROBE{number}", position + 1)
        if position < 0:
            return False
    return tools is None or "PROBE_TOOL" in rendered


def _places(template: ChatTemplate, kind: str) -> bool:
    """Does it write a placeholder for such a part: something, and not the part itself as Python or JSON spells it?"""
    text = text_part("PROBE1")

    def rendered(parts: list[dict[str, str]]) -> str:
        return template.render([{"role": "user", "content": parts}], seconds=_PROBE_SECONDS)

    def spelled(text: str) -> int:
        return len(re.findall(r"""['"]type['"]""", text))

    try:
        with_place, without = rendered([{"type": kind}, text]), rendered([text])
    except ForerunError:
        return False
    return "PROBE1" in with_place and len(with_place) > len(without) and spelled(with_place) == spelled(without)


def adapt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, habits: Habits
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Messages and tools as the template wants them."""
    adapted = [_with_content(message) for message in messages]
    listed = [dict(tool) for tool in tools] if tools else None
    if not habits.tools:
        adapted, listed = _tools_as_text(adapted, listed), None
    adapted = _fold_systems(adapted, habits)
    adapted = [_with_calls(message, habits) for message in adapted]
    if habits.short_ids:
        adapted = _with_short_ids(adapted)
    return (_in_parts(adapted) if habits.parts else adapted), listed


def _with_content(message: Mapping[str, Any]) -> dict[str, Any]:
    # An empty content rather than none: templates write "None", or add text to it.
    simple = {**message, "content": plain(message.get("content"))}
    if message.get("reasoning_content") is not None:
        simple |= dict.fromkeys(REASONING_NAMES, message["reasoning_content"])
    return simple


def _in_parts(messages: Messages) -> Messages:
    return [{**message, "content": in_parts(message["content"])} for message in messages]


def _fold_systems(messages: Messages, habits: Habits) -> Messages:
    """System messages stay where they are if the template keeps them there; else the next user turn takes them."""
    renamed = [
        {**message, "role": "system"} if message["role"] == "developer" and not habits.developer else message
        for message in messages
    ]
    leading = 0
    while leading < len(renamed) and renamed[leading]["role"] in ("system", "developer"):
        leading += 1
    if leading > 1 and not habits.system_later:
        first = {**renamed[0], "content": "\n\n".join(message["content"] for message in renamed[:leading])}
        renamed, leading = [first, *renamed[leading:]], 1
    kept = leading if habits.system_first else 0
    folded: Messages = renamed[:kept]
    waiting: list[str] = []
    for message in renamed[kept:]:
        if message["role"] in ("system", "developer") and not habits.system_later:
            waiting.append(message["content"])
            continue
        if waiting:
            if message["role"] == "user":
                message = {**message, "content": text_before(waiting, message["content"])}
            else:
                _add_user_text(folded, waiting)
            waiting = []
        folded.append(message)
    if waiting:
        _add_user_text(folded, waiting)
    return folded


def _add_user_text(messages: Messages, texts: list[str]) -> None:
    """At the end: to the user's turn that is there, or as one."""
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": text_after(messages[-1]["content"], texts)}
    else:
        messages.append({"role": "user", "content": "\n\n".join(texts)})


def _with_calls(message: dict[str, Any], habits: Habits) -> dict[str, Any]:
    if not message.get("tool_calls") or not habits.arguments_as_text:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(_arguments(call), ensure_ascii=False)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments") or {}


def _with_short_ids(messages: Messages) -> Messages:
    """Call ids of nine digits: some templates refuse all others."""
    numbers: dict[str, str] = {}

    def short(name: Any) -> str:
        return numbers.setdefault(str(name), f"{len(numbers) + 1:09d}")

    renamed = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id") is not None:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        renamed.append(message)
    return renamed


_TOOL_TEXT = """You can call functions. Their signatures are in these tags:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments in these tags, once for each call:
<tool_call>
{{"name": "the name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def _tools_as_text(messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """For templates that know nothing of tools: as text, in the form that most models have seen (Hermes)."""
    written: Messages = []
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        written.append({"role": "system", "content": _TOOL_TEXT.format(tools=listed)})
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1]["role"] == "user" and written[-1].get("results"):
                written[-1]["content"] += f"\n{answer}"
            else:
                written.append({"role": "user", "content": answer, "results": True})
        elif message["role"] == "user" and written and written[-1].get("results"):
            # One turn: templates that know nothing of tools often insist that turns alternate.
            written[-1] = {**message, "content": text_before([written[-1]["content"]], message["content"])}
        elif message.get("tool_calls"):
            calls = [
                json.dumps({"name": call["function"]["name"], "arguments": _arguments(call)}, ensure_ascii=False)
                for call in message["tool_calls"]
            ]
            texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**rest, "content": "\n".join(text for text in texts if text)})
        else:
            written.append(message)
    if tools and len(written) > 1 and written[1]["role"] in ("system", "developer"):
        first = {**written[1], "content": f"{written[1]['content']}\n\n{written[0]['content']}"}
        written = [first, *written[2:]]
    return [{key: value for key, value in message.items() if key != "results"} for message in written]
