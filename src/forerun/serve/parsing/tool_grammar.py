"""Grammars that make a model call tools: Lark for llguidance, in each family's own syntax.

With `required` the answer is one call or several, with `named` one call of one tool; with `auto` it is free text, and
every call in it is well formed (for tools that are `strict`). Thinking comes before the grammar and is not part of it.
Where a family writes arguments as JSON the tool's whole schema holds. Qwen3-Coder's and Gemma's own forms hold names,
types, enumerations and what is required; limits on lengths, ranges and patterns of bare texts are not enforced there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from forerun.errors import ForerunError
from forerun.serve.chat_job import Tool
from forerun.serve.parsing.formats import AnswerFormat
from forerun.serve.parsing.gemma_grammar import gemma_arguments
from forerun.serve.parsing.grammar_rules import Rules, quoted
from forerun.serve.parsing.schema_types import known_values, parameter_types, properties_of, required_of, types_of

MORE_CALLS = "{0,31}"  # behind the first one: a model that does not know when to stop is stopped
_ANYTHING = r"/(.|\n)*/"


def tool_grammar(
    format: AnswerFormat,
    tools: Sequence[Tool],
    mode: Literal["auto", "required", "named"],
    name: str = "",
    parallel: bool = True,
) -> str:
    """The grammar of an answer. A tool that the family cannot write is a `ForerunError`."""
    chosen = [tool for tool in tools if mode != "named" or tool.name == name]
    if not chosen or format.tools == "none":
        raise ForerunError(f"there is no tool named {name!r}" if mode == "named" else "there is no tool to call")
    rules = Rules(format.mark_ids)
    calls = _calls(rules, format, chosen, parallel and mode != "named")
    if mode == "auto":
        rules.add("start", _amid_text(rules, format, calls, parallel))
    else:
        # After thinking most models begin with empty lines.
        rules.add("start", f"/\\n{{0,2}}/ {calls}")
    return rules.text()


def _calls(rules: Rules, format: AnswerFormat, tools: Sequence[Tool], parallel: bool) -> str:
    """One call, or several."""
    if format.tools == "mistral" and "[ARGS]" not in format.mark_ids:
        rules.choice("call", [_json_object(rules, tool, "arguments") for tool in tools])
        more = f' (", " call){MORE_CALLS}' if parallel else ""
        return f'{rules.mark("[TOOL_CALLS]")} "[" call{more} "]"'
    rules.choice("call", [_call(rules, format, tool) for tool in tools])
    if not parallel:
        return "call"
    if format.tools in ("hermes", "qwen3_coder"):
        # Many models write a newline before they end: after it the answer may be over, too.
        return f'call ("\\n" call){MORE_CALLS} "\\n"?'
    separator = '"; "' if format.tools == "llama3_json" else ""
    return f"call ({separator} call){MORE_CALLS}"


def _call(rules: Rules, format: AnswerFormat, tool: Tool) -> str:
    if format.tools == "llama3_json":
        return _json_object(rules, tool, "parameters")
    if format.tools == "mistral":
        arguments = rules.json(_closed(tool.parameters), strict=tool.strict)
        return f"{rules.mark('[TOOL_CALLS]')} {quoted(tool.name)} {rules.mark('[ARGS]')} {arguments}"
    if format.tools == "gemma4":
        arguments = gemma_arguments(rules, _closed(tool.parameters))
        return f"{rules.mark('<|tool_call>')} {quoted(f'call:{tool.name}')} {arguments} {rules.mark('<tool_call|>')}"
    body = _coder_function(rules, tool) if format.tools == "qwen3_coder" else _json_object(rules, tool, "arguments")
    return f'{rules.mark("<tool_call>")} "\\n" {body} "\\n" {rules.mark("</tool_call>")}'


def _json_object(rules: Rules, tool: Tool, key: str) -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f'{quoted(head)} {rules.json(_closed(tool.parameters), strict=tool.strict)} "}}"'


def _coder_function(rules: Rules, tool: Tool) -> str:
    schema = _closed(tool.parameters)
    required = required_of(schema)
    parts = [quoted(f"<function={_plain(tool.name)}>\n")]
    for key in properties_of(schema):
        part = f"{quoted(f'<parameter={_plain(key)}>' + chr(10))} {_coder_value(rules, tool, key)} {quoted(chr(10))}"
        parts.append(rules.rule(part) + ("" if key in required else "?"))
    return " ".join([*parts, '"</function>"'])


def _coder_value(rules: Rules, tool: Tool, key: str) -> str:
    """A value with what ends it."""
    schema = tool.parameters["properties"][key]
    end = "\n</parameter>"
    known = known_values(schema)
    if known:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in known]
        return "(" + " | ".join(quoted(text + end) for text in texts) + ")"
    if "string" in parameter_types(tool.parameters, key):
        return rules.text_until(end)
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    return f"{rules.json({**schema, **shared}, strict=tool.strict)} {quoted(end)}"


def _amid_text(rules: Rules, format: AnswerFormat, calls: str, parallel: bool) -> str:
    """Free text in which a mark can only begin a call."""
    if format.tools == "llama3_json":
        rules.add("FREE", r"/[^\[{\s](.|\n)*/")
        return f"{calls} | FREE?"
    marks = {"hermes": ["<tool_call>"], "qwen3_coder": ["<tool_call>", "<function="], "mistral": ["[TOOL_CALLS]"]}
    free = _ANYTHING
    for mark in marks.get(format.tools, ["<|tool_call>"]):
        # Tokens of their own are not in free text anyway.
        if mark not in format.mark_ids:
            free += f" & ~/(.|\\n)*{re.escape(mark).replace('/', chr(92) + '/')}(.|\\n)*/"
    rules.add("FREE", free)
    return f"FREE ({calls} FREE)*" if parallel else f"FREE ({calls} FREE)?"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, and only those that the tool names, unless it says otherwise."""
    whole = dict(schema)
    if not any(word in whole for word in ("$ref", "anyOf", "oneOf", "allOf")):
        if types_of(whole, whole) >= {"object"}:
            whole["type"] = "object"
        whole.setdefault("additionalProperties", False)
    return whole


def _plain(name: str) -> str:
    if re.search(r"[<>\n]", name):
        raise ForerunError(f"the name {name[:60]!r} cannot be written in this model's tool format; rename it")
    return name
