"""What may come next in an answer: its form, tools that must be called, how long it may think, a least length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forerun.sample.building import build_constraint
from forerun.sample.constraint import Constraint
from forerun.sample.grammar import JSON_STYLE, Grammar, compile_grammar
from forerun.sample.grammar_text import GrammarLimits, check_output
from forerun.sample.schema_formats import with_lengths
from forerun.serve.chat_job import ChatJob, GenerationWish, OutputFormat, Tool
from forerun.serve.errors import bad_request
from forerun.serve.generation import stop_ids_of
from forerun.serve.model_service import LoadedModel
from forerun.serve.parsing.tool_grammar import tool_grammar

# What a model that thinks in <think> writes around its end: Qwen's own habit, and what others take as well.
CLOSING = {"think": "\n</think>\n\n"}
GAP = {"think": "\n\n"}
TOOLS_GROW = 8  # a tool's schema becomes rules in the family's syntax, which take more characters


def is_free(job: ChatJob) -> bool:
    """Most answers are: nothing has to be built for them."""
    wish, tools = job.wish, callable_tools(job)
    constrained = wish.output is not None or wish.min_tokens > 0 or job.thinking.budget is not None
    return not constrained and not tools


def callable_tools(job: ChatJob) -> Sequence[Tool]:
    """Who must not call tools does not see them either."""
    return () if job.tool_choice.mode == "none" else job.tools


def check_tools(tools: Sequence[Tool]) -> None:
    """Calls have named arguments: what describes anything but an object can never be called."""
    for tool in tools:
        properties = tool.parameters.get("properties")
        if tool.parameters.get("type", "object") != "object" or not isinstance(properties, Mapping | None):
            raise bad_request(f"The parameters of the tool '{tool.name}' must be a JSON schema of an object.", "tools")


def output_grammar(model: LoadedModel, output: OutputFormat | None, limits: GrammarLimits) -> Grammar | None:
    """None: any text. It takes up to some hundred milliseconds: not for the event loop."""
    if output is None:
        return None
    return compile_grammar(model.grammar_vocabulary, output.kind, output.value, limits)


def chat_grammar(model: LoadedModel, job: ChatJob, limits: GrammarLimits) -> Grammar | None:
    """Of the answer proper. The form that was asked for is the text's; calls of tools have their own."""
    tools, choice, output = callable_tools(job), job.tool_choice, job.wish.output
    if not tools:
        return output_grammar(model, output, limits)
    calls = replace(limits, characters=limits.characters * TOOLS_GROW)
    if choice.mode == "required" or choice.mode == "named":
        source = tool_grammar(model.format, tools, choice.mode, choice.name, choice.parallel)
    elif output is not None:
        source = _calls_or(output, tool_grammar(model.format, tools, "required", parallel=choice.parallel), limits)
    elif any(tool.strict for tool in tools) or not choice.parallel:
        source = tool_grammar(model.format, tools, "auto", parallel=choice.parallel)
    else:
        return None
    return compile_grammar(model.grammar_vocabulary, "grammar", source, calls)


def _calls_or(output: OutputFormat, calls: str, limits: GrammarLimits) -> str:
    """Either calls of tools, or text of this form. `calls` begins with its start rule."""
    if output.kind not in ("json_object", "json_schema"):
        raise bad_request("With tools the answer's form can only be JSON.", "structured_outputs")
    check_output(output.kind, output.value, limits)
    schema = {"type": "object"} if output.kind == "json_object" else output.value
    assert calls.startswith("start: ")
    whole = json.dumps({**with_lengths(schema), "x-guidance": JSON_STYLE}, ensure_ascii=False)
    return f"start: calls_ | text_\ntext_: %json {whole}\ncalls_: {calls.removeprefix('start: ')}"


def text_constraints(model: LoadedModel, wish: GenerationWish, grammar: Grammar | None) -> Sequence[Constraint | None]:
    """For each decoding of a text completion."""
    stop_ids, vocab = stop_ids_of(model, wish), model.vocab
    return [
        build_constraint(vocab, stop_ids, grammar=grammar, min_tokens=wish.min_tokens) for _ in range(wish.decodings)
    ]


def chat_constraints(
    model: LoadedModel, job: ChatJob, grammar: Grammar | None, thinking_open: bool
) -> Sequence[Constraint | None]:
    """For each decoding of a chat. A grammar begins behind the thinking."""
    form, wish = model.format, job.wish
    if form.think_start is None or form.think_end is None:
        return text_constraints(model, wish, grammar)
    may_start = not thinking_open and job.thinking.enabled is not False
    return [
        build_constraint(
            model.vocab,
            stop_ids_of(model, wish),
            grammar=grammar,
            thinking_open=thinking_open,
            think_start_ids=model.ids_of(form.think_start) if may_start else (),
            think_end_ids=model.ids_of(form.think_end),
            closing_ids=model.ids_of(CLOSING.get(form.reasoning, form.think_end)),
            gap_ids=model.ids_of(GAP.get(form.reasoning, "")),
            budget=job.thinking.budget,
            min_tokens=wish.min_tokens,
        )
        for _ in range(wish.decodings)
    ]
