"""The right parser for a model's format and a request's tools."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.serve.chat_job import Tool
from forerun.serve.parsing import hermes
from forerun.serve.parsing.answer import TaggedParser
from forerun.serve.parsing.formats import THINK_MARKS, AnswerFormat
from forerun.serve.parsing.pieces import AnswerParser


def make_parser(
    format: AnswerFormat, tools: Sequence[Tool], *, thinking_open: bool, tools_enabled: bool
) -> AnswerParser:
    """A parser for one answer. Without tools, or with tools switched off, nothing is a call."""
    think = THINK_MARKS.get(format.reasoning)
    anywhere = format.reasoning != "think"
    if not tools or not tools_enabled or format.tools == "none":
        return TaggedParser(think=think, think_anywhere=anywhere, thinking_open=thinking_open)
    return TaggedParser(
        think=think,
        think_anywhere=anywhere,
        thinking_open=thinking_open,
        marks=hermes.MARKS,
        make_reader=hermes.HermesReader,
    )
