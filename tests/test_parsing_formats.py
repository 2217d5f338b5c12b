"""Formats read off templates and tokenizers, settings that overrule them, and types of bare values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import MISTRAL, QWEN, tokenizer_with
from families import MARKS, TOOLS, family_tokenizer
from tiny import CHAT_TEMPLATE

from forerun.errors import ForerunError
from forerun.serve.model_service import LoadedModel
from forerun.serve.parsing.formats import REASONING_PARSERS, TOOL_PARSERS, detect_format, format_of
from forerun.serve.parsing.make import make_parser
from forerun.serve.parsing.schema_types import types_of, value_as_json
from forerun.serve.settings import ServeSettings
from forerun.serve.settings_check import check_settings
from forerun.text.answer import AnswerText

CODER = "<tool_call>\n<function=name>\n<parameter=key>"
GEMMA = "{% if enable_thinking %}<|think|>{% endif %}<|tool_call>call:<|channel>thought"
LLAMA = """Environment: ipython {"name": function, "parameters": {}} <|python_tag|>"""


@pytest.mark.parametrize(
    ("template", "reasoning", "tools", "switch"),
    [
        (QWEN, "think", "hermes", "enable_thinking"),
        (CODER, "none", "qwen3_coder", None),
        (CODER + "<think>", "think", "qwen3_coder", None),
        (GEMMA, "gemma4", "gemma4", "enable_thinking"),
        (LLAMA, "none", "llama3_json", None),
        (MISTRAL, "none", "mistral", None),
        (MISTRAL + "[THINK]", "mistral", "mistral", None),
        (CHAT_TEMPLATE, "none", "hermes", None),
        (None, "none", "hermes", None),
        ("{% if thinking %}<think>{% endif %}", "think", "hermes", "thinking"),
        ("{{ message.thinking }}</think>", "think", "hermes", None),
    ],
)
def test_formats_are_read_off_templates(template: str | None, reasoning: str, tools: str, switch: str | None) -> None:
    found = detect_format(template, {})
    assert (found.reasoning, found.tools, found.thinking_switch) == (reasoning, tools, switch)
    assert (found.think_end is None) == (reasoning == "none")


def test_settings_overrule_the_template() -> None:
    for parser in TOOL_PARSERS[1:]:
        assert detect_format(QWEN, {}, tool_parser=parser).tools == parser
    for parser in REASONING_PARSERS[1:]:
        assert detect_format(QWEN, {}, reasoning_parser=parser).reasoning == parser
    assert detect_format(QWEN, {}, reasoning_parser="none").think_start is None
    with pytest.raises(ForerunError, match="--tool-parser pythonic"):
        detect_format(QWEN, {}, tool_parser="pythonic")
    with pytest.raises(ForerunError, match="--reasoning-parser x"):
        detect_format(QWEN, {}, reasoning_parser="x")


def test_a_thinking_token_without_a_word_of_it_in_the_template_is_enough() -> None:
    assert detect_format(CHAT_TEMPLATE, {"<think>": 5}).reasoning == "think"


@pytest.mark.parametrize("family", sorted(MARKS))
def test_marks_of_a_tokenizer_reach_the_parser_as_text(family: str) -> None:
    """From ids to calls: special marks are shown, all others have text anyway."""
    tokenizer = family_tokenizer(family)
    examples = {
        "hermes": '<think>a</think>b<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "qwen3_coder": "<think>a</think>b<tool_call><function=now></function></tool_call>",
        "gemma4": '<|channel>thought\na<channel|>b<|tool_call>call:now{a:<|"|>x<|"|>}<tool_call|>',
        "llama3_json": 'b<|python_tag|>{"name": "now", "parameters": {}}',
        "mistral": "[THINK]a[/THINK]b[TOOL_CALLS]now[ARGS]{}",
    }
    text = examples[family]
    format = format_of(
        tokenizer, reasoning_parser=family if family in REASONING_PARSERS else "auto", tool_parser=family
    )
    marks, special = MARKS[family]
    assert set(format.mark_ids) == set(marks)
    assert format.shown == (set(marks) if special else set())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    sink = AnswerText(tokenizer, [], [], format.shown)
    assert "".join(sink.push(token)[0] for token in ids) + sink.flush() == text
    parser = make_parser(format, TOOLS, thinking_open=False)
    kinds = [type(piece).__name__ for piece in [*parser.push(text), *parser.finish()]]
    thinks = [] if family == "llama3_json" else ["Reasoning"]
    assert kinds == [*thinks, "Content", "CallStart", "CallArguments", "CallEnd"]


def test_a_template_that_only_speaks_of_calls_gets_tools_as_text_and_calls_in_that_form() -> None:
    speaks = CHAT_TEMPLATE + "{# <function= #}"
    assert detect_format(speaks, {}).tools == "qwen3_coder"
    assert format_of(tokenizer_with(speaks)).tools == "hermes"
    assert format_of(tokenizer_with(speaks), tool_parser="qwen3_coder").tools == "qwen3_coder"
    assert format_of(tokenizer_with(MISTRAL)).tools == "mistral"


def test_the_format_of_a_model_without_a_template() -> None:
    assert format_of(tokenizer_with(None)).tools == "hermes"
    assert format_of(tokenizer_with(QWEN, "<tool_call>")).mark_ids.keys() == {"<tool_call>"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "object"}, {"$ref": "#/$defs/x"}]}, {"object", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"string", "number", "boolean", "null", "object", "array"}),
        ({"$ref": "https://elsewhere"}, {"string", "number", "boolean", "null", "object", "array"}),
        ({"type": "colour"}, {"string", "number", "boolean", "null", "object", "array"}),
        (True, {"string", "number", "boolean", "null", "object", "array"}),
    ],
)
def test_types_of_schemas(schema: Any, expected: set[str]) -> None:
    root = {"$defs": {"x": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(schema, root) == expected


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"number"}, 5),
        ("5", {"string"}, "5"),
        ("5", {"string", "number"}, 5),
        ("5", {"boolean"}, "5"),
        ("TRUE", {"boolean"}, True),
        ("none", {"null", "string"}, None),
        ("none", {"string"}, "none"),
        ("[1", {"array"}, "[1"),
        (' {"a": [1]} ', {"object"}, {"a": [1]}),
        ('"quoted"', {"string"}, '"quoted"'),
        ("1e400", {"string"}, "1e400"),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("9" * 5000, {"number"}, "9" * 5000),
        ("__import__('os').system('true')", {"object", "array"}, "__import__('os').system('true')"),
    ],
)
def test_bare_values_become_json(text: str, types: set[str], expected: Any) -> None:
    assert json.loads(value_as_json(text, frozenset(types))) == expected


@pytest.mark.parametrize("broken", ["{% if %}", {"other": "x"}])
def test_a_broken_template_does_not_keep_a_model_from_loading(broken: Any) -> None:
    assert format_of(tokenizer_with(broken)).tools == "hermes"


def test_settings_choose_the_format_of_a_served_model() -> None:
    settings = {"tool_parser": "mistral", "reasoning_parser": "think"}
    model = LoadedModel(tokenizer=tokenizer_with(QWEN), context=100, vocab=300, **settings)
    assert (model.format.tools, model.format.reasoning) == ("mistral", "think")
    check_settings(ServeSettings(**settings))
    for name in settings:
        with pytest.raises(ForerunError, match=f"--{name.replace('_', '-')} x: use one of auto, none"):
            check_settings(ServeSettings(**{name: "x"}))
