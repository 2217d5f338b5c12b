"""The right parser for a model's format and a request's tools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from forerun.serve.chat_job import Tool
from forerun.serve.parsing import gemma, json_call, json_list, mistral, qwen_coder
from forerun.serve.parsing.answer import MakeReader, TaggedParser
from forerun.serve.parsing.formats import AnswerFormat
from forerun.serve.parsing.pieces import AnswerParser
from forerun.text.chat import THINK_MARKS


def make_parser(format: AnswerFormat, tools: Sequence[Tool], *, thinking_open: bool) -> AnswerParser:
    """A parser for one answer. Without tools nothing is a call."""
    marks, first_marks, reader = _family(format, tools)
    return TaggedParser(
        think=THINK_MARKS.get(format.reasoning),
        think_anywhere=format.reasoning != "think",  # the other families' marks are tokens that nobody writes by chance
        thinking_open=thinking_open,
        marks=marks,
        first_marks=first_marks,
        make_reader=reader,
    )


def _family(format: AnswerFormat, tools: Sequence[Tool]) -> tuple[tuple[str, ...], tuple[str, ...], MakeReader | None]:
    """What begins calls, what begins them only at the beginning of the text, and who reads them."""
    if not tools or format.tools == "none":
        return (), (), None
    if format.tools == "qwen3_coder":
        return qwen_coder.MARKS, (), partial(qwen_coder.QwenCoderReader, tools=tools)
    if format.tools == "llama3_json":
        return json_list.LLAMA_MARKS, json_list.LLAMA_FIRST_MARKS, json_list.LlamaReader
    if format.tools == "gemma4":
        return gemma.MARKS, (), gemma.GemmaReader
    if format.tools == "mistral":
        return mistral.MARKS, (), mistral.MistralReader
    return json_call.HERMES_MARKS, (), json_call.HermesReader
