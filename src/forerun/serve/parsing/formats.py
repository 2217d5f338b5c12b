"""How a model writes its thinking and its tool calls: read off its chat template, or told by a setting."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from forerun.errors import ForerunError
from forerun.text.chat import THINK_MARKS, chat_template
from forerun.text.habits import habits_of
from forerun.text.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReasoningStyle = Literal["none", "think", "gemma4", "mistral"]
ToolStyle = Literal["none", "hermes", "qwen3_coder", "gemma4", "llama3_json", "mistral"]
# What `--reasoning-parser` and `--tool-parser` may say.
REASONING_PARSERS = ("auto", *get_args(ReasoningStyle))
TOOL_PARSERS = ("auto", *get_args(ToolStyle))

# Tokens that the parsers must see; where a tokenizer calls them special they would give no text.
_THINK_TOKENS: dict[ReasoningStyle, tuple[str, ...]] = {
    "none": (),
    "think": THINK_MARKS["think"],
    "gemma4": ("<|channel>", "<channel|>"),
    "mistral": THINK_MARKS["mistral"],
}
_TOOL_TOKENS: dict[ToolStyle, tuple[str, ...]] = {
    "none": (),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
_SWITCHES = ("enable_thinking", "thinking")  # names of template options, the commonest first


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the parsers, the detokenizer, the grammars and the thinking budget must know of a model."""

    reasoning: ReasoningStyle = "none"
    tools: ToolStyle = "hermes"
    thinking_switch: str | None = None  # the template option that turns thinking on and off
    mark_ids: Mapping[str, int] = field(default_factory=dict)  # marks that are tokens of their own
    shown: frozenset[str] = frozenset()  # marks that are special tokens: the detokenizer must give their text

    @property
    def think_start(self) -> str | None:
        """What begins thinking."""
        return THINK_MARKS[self.reasoning][0] if self.reasoning != "none" else None

    @property
    def think_end(self) -> str | None:
        """What ends it."""
        return THINK_MARKS[self.reasoning][1] if self.reasoning != "none" else None


def detect_format(
    template: str | None,
    added_tokens: Mapping[str, int],
    special_tokens: Collection[str] = (),
    *,
    reasoning_parser: str = "auto",
    tool_parser: str = "auto",
) -> AnswerFormat:
    """Reads it off the template. `added_tokens`: texts and ids of a tokenizer's; some of them are special."""
    template = template or ""
    reasoning = _checked(reasoning_parser, REASONING_PARSERS, "--reasoning-parser")
    tools = _checked(tool_parser, TOOL_PARSERS, "--tool-parser")
    if reasoning == "auto":
        reasoning = _reasoning_style(template, added_tokens)
    if tools == "auto":
        tools = _tool_style(template)
    assert reasoning in _THINK_TOKENS
    assert tools in _TOOL_TOKENS
    options = _options(template)
    switch = next((name for name in _SWITCHES if name in options), None)
    used = (*_THINK_TOKENS[reasoning], *_TOOL_TOKENS[tools])
    ids = {text: added_tokens[text] for text in used if text in added_tokens}
    shown = frozenset(text for text in used if text in special_tokens)
    return AnswerFormat(reasoning, tools, switch if reasoning != "none" else None, ids, shown)


def format_of(
    tokenizer: PreTrainedTokenizerBase, *, reasoning_parser: str = "auto", tool_parser: str = "auto"
) -> AnswerFormat:
    """The format of a loaded model. Of several templates the one for tools tells more."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    try:
        template = chat_template(tokenizer, with_tools=True).source
    except ForerunError:
        template = None  # there is none, or it is broken: chats say so, and the model still completes text
    if tool_parser == "auto" and template and not habits_of(template, tokenizer.special_tokens_map).tools:
        tool_parser = "hermes"  # tools are described as text then, and calls asked for in this form
    return detect_format(
        template,
        {token.content: index for index, token in added.items()},
        {token.content for token in added.values() if token.special},
        reasoning_parser=reasoning_parser,
        tool_parser=tool_parser,
    )


def _reasoning_style(template: str, added_tokens: Mapping[str, int]) -> ReasoningStyle:
    if "<|channel>" in template:
        return "gemma4"
    if "[THINK]" in template:
        return "mistral"
    if "<think>" in template or "</think>" in template or "<think>" in added_tokens:
        return "think"
    return "none"


def _tool_style(template: str) -> ToolStyle:
    if "<|tool_call>" in template:
        return "gemma4"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return "hermes"  # what `encode_chat` tells a model whose template knows nothing of tools


def _options(template: str) -> frozenset[str]:
    try:
        return ChatTemplate(template, {}).options()
    except ForerunError:
        return frozenset()  # it cannot be rendered either, and says so then


def _checked(value: str, known: tuple[str, ...], flag: str) -> str:
    if value not in known:
        raise ForerunError(f"{flag} {value} is unknown; use one of {', '.join(known)}")
    return value
