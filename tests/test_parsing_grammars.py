"""Grammars of tool calls: llguidance takes them, and what is written under them is calls that the parsers read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from families import FORMATS, TOOLS, family_format, family_tokenizer, joined, short
from serve_fakes import FakeEngine, loaded

from forerun.errors import ForerunError
from forerun.sample.grammar import GrammarVocabulary, compile_grammar
from forerun.sample.grammar_text import DEFAULT_LIMITS
from forerun.serve.chat_job import ChatJob, GenerationWish, OutputFormat, Tool, ToolChoice
from forerun.serve.constraining import chat_grammar
from forerun.serve.parsing.formats import AnswerFormat
from forerun.serve.parsing.make import make_parser
from forerun.serve.parsing.tool_grammar import tool_grammar

llguidance = pytest.importorskip("llguidance")
from_tokenizer = pytest.importorskip("llguidance.hf").from_tokenizer
FAMILIES = sorted(FORMATS)

EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São \\"P\\"", "days": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão\n\nP\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>São "P"<|"|>,days:3}<tool_call|>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "São", "days": 3}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "São", "days": 3}',
}
SEPARATORS = {"llama3_json": "; ", "hermes": "\n", "qwen3_coder": "\n"}


@lru_cache(maxsize=8)
def vocabulary(name: str) -> tuple[Any, Any]:
    tokenizer = family_tokenizer(name)
    return tokenizer, from_tokenizer(tokenizer)


def matcher(name: str, lark: str) -> Any:
    _, tokens = vocabulary(name)
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    assert llguidance.LLMatcher.validate_grammar(grammar, tokens) == ""
    return llguidance.LLMatcher(tokens, grammar)


def accepts(name: str, lark: str, text: str) -> bool:
    """Is the whole text an answer of this grammar?"""
    tokenizer, _ = vocabulary(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    checker = matcher(name, lark)
    return checker.try_consume_tokens(ids) == len(ids) and checker.is_accepting()


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_as_the_family_writes_them_are_accepted(name: str) -> None:
    format, example = family_format(name), EXAMPLES[name]
    lark = tool_grammar(format, TOOLS, "required")
    two = example + SEPARATORS.get(name, "") + example
    assert accepts(name, lark, example)
    assert accepts(name, lark, two)
    assert not accepts(name, tool_grammar(format, TOOLS, "required", parallel=False), two)
    named = tool_grammar(format, TOOLS, "named", "get_weather")
    assert accepts(name, named, example)
    assert not accepts(name, named, two)
    assert accepts(name, lark, SEPARATORS.get(name, "").join([example] * 32))
    assert not accepts(name, lark, SEPARATORS.get(name, "").join([example] * 33))
    assert accepts(name, lark, f"{example}\n") == (SEPARATORS.get(name) == "\n")
    assert not accepts(name, tool_grammar(format, TOOLS, "named", "write"), example)
    assert not accepts(name, lark, "Hello.")
    assert not accepts(name, lark, example.replace("get_weather", "unknown"))
    assert not accepts(name, lark, example.replace("city", "town"))


@pytest.mark.parametrize("name", FAMILIES)
def test_under_auto_text_is_free_and_calls_are_well_formed(name: str) -> None:
    lark = tool_grammar(family_format(name), TOOLS, "auto")
    example = EXAMPLES[name]
    assert accepts(name, lark, "Hello, {world}.")
    assert accepts(name, lark, "")
    assert accepts(name, lark, example)
    assert not accepts(name, lark, example.replace("city", "town"))
    if name != "llama3_json":  # calls only at the beginning
        assert accepts(name, lark, f"Let me see.\n\n{example}")
        assert accepts(name, lark, f"a {example} b {example}")
        assert not accepts(name, lark, f"Let me see.\n\n{example.replace('city', 'town')}")


def test_marks_that_are_not_tokens_are_spelled_out() -> None:
    for name in FAMILIES:
        lark = tool_grammar(FORMATS[name], TOOLS, "required")
        assert "<[" not in lark
    old = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    format = replace(
        family_format("mistral"), mark_ids={"[TOOL_CALLS]": family_format("mistral").mark_ids["[TOOL_CALLS]"]}
    )
    assert accepts("mistral", tool_grammar(format, TOOLS, "required"), old)


@pytest.mark.parametrize("name", FAMILIES)
def test_many_tools_with_long_descriptions_fit_into_the_limits_of_a_request(name: str) -> None:
    """As coding agents send them: thirty tools, most of it prose."""
    properties = {f"{word}_{i}": {"type": "string", "description": "d" * 300} for i in range(8) for word in ("a", "b")}
    properties["description"] = {"type": "string", "default": "x", "enum": ["x", "title"]}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties}
    tools = [Tool(f"tool_{i}", parameters={**schema, "required": ["a_0", "description"]}) for i in range(30)]
    tokenizer = family_tokenizer(name)
    lark = tool_grammar(family_format(name), tools, "required")
    compile_grammar(GrammarVocabulary(tokenizer, len(tokenizer)), "grammar", lark)
    assert lark.count("dddd") == 0
    assert "title" in lark


def test_tools_that_cannot_be_called_are_errors() -> None:
    with pytest.raises(ForerunError, match="no tool named"):
        tool_grammar(FORMATS["hermes"], TOOLS, "named", "nothing")
    with pytest.raises(ForerunError, match="rename"):
        tool_grammar(FORMATS["qwen3_coder"], [Tool("f", parameters={"properties": {"a>b": {}}})], "required")


MORE_TOOLS = [
    *TOOLS,
    Tool(
        "tree",
        parameters={
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}, "kind": {"const": "full"}},
            "required": ["root"],
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool(
        "pick",
        parameters={
            "type": "object",
            "properties": {
                "level": {"enum": [1, 2, "high", None]},
                "flags": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["level", "flags"],
        },
    ),
]
ENDS = ['<|"|>', "\n</parameter>", '"}', '"]}', "}", "]", '"', "null", "</function>\n</tool_call>"]


def written_under(name: str, format: AnswerFormat, seed: int) -> str:
    """A random text under the grammar: tokens drawn from the mask, with a will to come to an end."""
    tokenizer, _ = vocabulary(name)
    dice = random.Random(seed)
    checker = matcher(name, tool_grammar(format, MORE_TOOLS, "required"))
    ids: list[int] = []
    endings = [tokenizer(end, add_special_tokens=False)["input_ids"] for end in ENDS]
    while len(ids) < 400:
        if checker.is_accepting() and dice.random() < 0.4:
            return str(tokenizer.decode(ids))
        forced = checker.compute_ff_tokens()
        dice.shuffle(endings)
        for end in endings if not forced and dice.random() < 0.15 + len(ids) / 400 else []:
            if checker.validate_tokens(end) == len(end):
                forced = end
                break
        if not forced:
            mask = checker.compute_bitmask()
            allowed = [t for t in range(len(tokenizer)) if mask[t // 8] >> (t % 8) & 1 and t != tokenizer.eos_token_id]
            # Whole ASCII characters: single bytes of longer ones would need their partners.
            allowed = [t for t in allowed if t > 260 or tokenizer.decode([t]).isascii()]
            forced = [dice.choice(allowed)] if allowed else []
        if not forced:
            break
        assert checker.consume_tokens(forced)
        ids += forced
    return ""  # the dice did not come to an end


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_under_a_grammar_is_calls_with_valid_arguments(name: str) -> None:
    format = family_format(name)
    schemas = {tool.name: tool.parameters for tool in MORE_TOOLS}
    seen: set[str] = set()
    finished = 0
    for seed in range(25):
        text = written_under(name, format, seed)
        if not text:
            continue
        finished += 1
        parser = make_parser(format, MORE_TOOLS, thinking_open=False)
        pieces = short(joined([*parser.push(text), *parser.finish()]))
        assert pieces
        for call in pieces:
            assert isinstance(call, tuple), (text, pieces)
            jsonschema.validate(json.loads(call[1]), schemas[call[0]])
            seen.add(call[0])
    assert finished >= 15
    assert len(seen) >= 4


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["alone", "beside tools"])
def test_formats_end_where_their_standards_do(tools: Sequence[Tool]) -> None:
    """An answer's form is the same whether there are tools or not."""
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"to": {"type": "string", "format": "email"}}, "required": ["to"]}
    job = ChatJob(
        messages=[{"role": "user", "content": "x"}],
        wish=GenerationWish(output=OutputFormat("json_schema", schema)),
        tools=tools,
        tool_choice=ToolChoice("auto" if tools else "none"),
    )
    grammar = chat_grammar(loaded(engine), job, DEFAULT_LIMITS)
    assert grammar is not None

    def legal(address: str) -> bool:
        tokens = engine.tokenizer(f'{{"to": "{address}"}}', add_special_tokens=False)["input_ids"]
        return grammar.start(frozenset({2})).legal(tokens) == len(tokens)

    assert legal("me@there.org") and legal("a" * 60 + "@" + "b" * 60)
    assert not legal("a" * 300 + "@there.org")


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
@pytest.mark.parametrize(
    "odd",
    [{"required": True}, {"required": [["a"]]}, {"required": "a"}, {"properties": [1]}, {"properties": "a"}],
    ids=str,
)
def test_a_schema_that_is_none_is_the_clients_error(name: str, odd: dict[str, Any]) -> None:
    schema = {"type": "object", **odd}
    if "required" not in odd:  # what is wrong with the whole is found before
        schema = {"type": "object", "properties": {"inner": schema}, "required": ["inner"]}
    with pytest.raises(ForerunError, match=r"must be|cannot be used"):
        compile_grammar(*grammar_of(name, schema))


def grammar_of(name: str, schema: dict[str, Any]) -> tuple[Any, Any, str]:
    vocabulary = GrammarVocabulary(family_tokenizer(name), 310, {2})
    return vocabulary, "grammar", tool_grammar(family_format(name), [Tool("f", parameters=schema)], "required")


def test_words_of_a_schema_that_are_no_lists_say_nothing() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer", "anyOf": 7}}, "oneOf": 7}
    assert compile_grammar(*grammar_of("gemma4", odd))
