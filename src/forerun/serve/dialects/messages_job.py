"""From a request to /v1/messages to a chat job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forerun.serve.chat_job import ChatJob, GenerationWish, OutputFormat, ThinkingWish, Tool, ToolChoice
from forerun.serve.dialects import messages_blocks as blocks
from forerun.serve.dialects.conversation import Conversation, check_choice, only_users_show, unreadable
from forerun.serve.dialects.messages_events import SIGNATURE
from forerun.serve.dialects.messages_request import AnthropicMessage, CountRequest, MessagesRequest
from forerun.serve.dialects.notes import Notes
from forerun.serve.effort import BUDGETS, Effort
from forerun.serve.errors import bad_request
from forerun.serve.sent_media import SentMedia
from forerun.text.content import BETWEEN

# Claude Code puts this block first. It differs from request to request, and would make every prompt a new one.
BILLING = "x-anthropic-billing-header"


class ConversationTools:
    """The tools it declares, with what the conversation added and took away.

    A prompt has one list of tools, at its beginning: the one that holds at the end of the conversation.
    """

    def __init__(self, declared: Iterable[blocks.AnyTool], notes: Notes) -> None:
        self._notes = notes
        self._known: dict[str, Tool] = {}
        self._gone: set[str] = set()
        for tool in declared:
            if isinstance(tool, blocks.CustomTool) and tool.name in self._known:
                raise bad_request(f"Two tools are called '{tool.name}'.", "tools")
            self._define(tool)

    @property
    def tools(self) -> list[Tool]:
        """In the order they were declared."""
        return [tool for tool in self._known.values() if tool.name not in self._gone]

    def change(self, block: blocks.ToolChangeBlock, param: str) -> None:
        """In the middle of the conversation."""
        tool = block.tool
        self._notes.fields(block, "cache_control")
        if isinstance(tool, blocks.InlineTool):
            self._define(tool.definition)
            name = tool.definition.name
        elif isinstance(tool, blocks.ToolName):
            name = tool.name
            if name not in self._known:
                raise bad_request(f"There is no tool '{name}' to add or remove.", param)
        else:
            self._notes.unused(f"{block.type} {tool.type}")
            return
        if block.type == "tool_removal":
            self._gone.add(name or "")
        else:
            self._gone.discard(name or "")

    def _define(self, tool: blocks.AnyTool) -> None:
        if not isinstance(tool, blocks.CustomTool):
            self._notes.unused(f"tool {tool.type}")
            return
        self._notes.fields(tool, "cache_control")
        unused = ("input_examples", "allowed_callers", "defer_loading", "eager_input_streaming")
        self._notes.fields(tool, *unused, under="tools.")
        self._known[tool.name] = Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))


def make_job(request: CountRequest, notes: Notes) -> ChatJob:
    """The job."""
    _note_unused(request, notes)
    conversation = Conversation()
    conversation.system(_system(request, notes))
    declared = ConversationTools(request.tools or (), notes)
    last_user = max((i for i, turn in enumerate(request.messages) if turn.role == "user"), default=-1)
    for index, turn in enumerate(request.messages):
        cleared = turn.role == "system" and turn.clear_at == "next_user_message" and index < last_user
        _add_turn(conversation, declared, turn, f"messages[{index}]", notes, cleared)
    conversation.end()
    tools = declared.tools
    thinking, options = request.template(_thinking(request, notes))
    return ChatJob(
        messages=conversation.messages,
        media=tuple(conversation.media),
        wish=_wish(request),
        tools=tools,
        tool_choice=check_choice(_choice(request, notes), tools),
        thinking=thinking,
        template_options=options,
        continue_last=conversation.ends_with_text,
    )


def _wish(request: CountRequest) -> GenerationWish:
    output = _output(request)
    if not isinstance(request, MessagesRequest):
        return request.wish(output=output)
    return request.wish(max_tokens=request.max_tokens, stop=request.stop_sequences, output=output)


def _output(request: CountRequest) -> OutputFormat | None:
    if request.output_config and request.output_config.format:
        return OutputFormat("json_schema", request.output_config.format.schema_, "output_config.format")
    return (
        OutputFormat("json_schema", request.output_format.schema_, "output_format") if request.output_format else None
    )


def _system(request: CountRequest, notes: Notes) -> str:
    if request.system is None or isinstance(request.system, str):
        return request.system or ""
    parts = list(request.system)
    if parts and parts[0].text.startswith(BILLING):
        notes.unused("billing header")
        del parts[0]
    return _text(parts, "system", notes)


def _effort(request: CountRequest, notes: Notes) -> Effort | None:
    """The last word on it."""
    said = [
        options for options in (request.output_config, *(turn.output_config for turn in request.messages)) if options
    ]
    if any(options.timing for options in said):
        notes.unused("output_config.timing")
    return next((options.effort for options in reversed(said) if options.effort), None)


def _choice(request: CountRequest, notes: Notes) -> ToolChoice:
    wanted = request.tool_choice
    if wanted is None:
        return ToolChoice()
    parallel = not wanted.disable_parallel_tool_use
    if wanted.type != "tool":
        notes.fields(wanted, "name", under="tool_choice.")
    if wanted.type == "tool":
        if not wanted.name:
            raise bad_request("'tool_choice' of type 'tool' needs a name.", "tool_choice.name")
        return ToolChoice("named", wanted.name, parallel)
    return ToolChoice("required" if wanted.type == "any" else wanted.type, parallel=parallel)


def _thinking(request: CountRequest, notes: Notes) -> ThinkingWish:
    """Effort says how long it may take, where nothing else does."""
    wanted, effort = request.thinking, _effort(request, notes)
    budget = BUDGETS[effort] if effort else None
    if wanted is None:
        return ThinkingWish(budget=budget)
    notes.fields(wanted, "display", "block_binding", under="thinking.")
    if wanted.type == "between_tools":
        notes.unused("thinking between_tools")
    enabled = {"enabled": True, "disabled": False}.get(wanted.type)
    if enabled is False:
        notes.fields(wanted, "budget_tokens", under="thinking.")
        return ThinkingWish(enabled=False)
    return ThinkingWish(enabled, budget if wanted.budget_tokens is None else wanted.budget_tokens)


def _add_turn(
    conversation: Conversation,
    declared: ConversationTools,
    turn: AnthropicMessage,
    param: str,
    notes: Notes,
    cleared: bool,
) -> None:
    """`cleared`: a message of the system whose time is over; what it did to the tools stays."""
    if isinstance(turn.content, str):
        parts: Sequence[Any] = [blocks.TextBlock(type="text", text=turn.content)]
    else:
        parts = turn.content
    for index, block in enumerate(parts):
        if isinstance(block, blocks.ToolChangeBlock):
            declared.change(block, f"{param}.content[{index}]")
    parts = [block for block in parts if not isinstance(block, blocks.ToolChangeBlock)]
    if turn.role == "system":
        if not cleared:
            conversation.system(_text(parts, f"{param}.content", notes))
        return
    says = conversation.says if turn.role == "assistant" else conversation.user
    for index, block in enumerate(parts):
        place = f"{param}.content[{index}]"
        _note_block(block, notes)
        match block:
            case blocks.ToolResultBlock():
                conversation.result(block.tool_use_id, *_result(block, f"{place}.content", notes))
            case blocks.ToolUseBlock():
                conversation.calls(block.id, block.name, block.input)
            case blocks.ThinkingBlock():
                conversation.thinks(block.thinking)
            case blocks.RedactedThinkingBlock() | blocks.ForeignBlock():
                notes.unused(f"content block {block.type}")
            case blocks.ImageBlock() if turn.role == "user":
                conversation.shows(_image(block, place))
            case _:
                says(_text([block], place, notes))


def _result(block: blocks.ToolResultBlock, param: str, notes: Notes) -> tuple[str, list[SentMedia]]:
    """Templates have no word for failure: the text must say it."""
    if isinstance(block.content, str):
        text, media = block.content, []
    else:
        parts = list(enumerate(block.content or ()))
        media = [_image(part, f"{param}[{at}]") for at, part in parts if isinstance(part, blocks.ImageBlock)]
        text = _text([part for _, part in parts if not isinstance(part, blocks.ImageBlock)], param, notes)
    return (f"Error: {text}" if block.is_error and "error" not in text[:40].lower() else text), media


def _image(block: blocks.ImageBlock, param: str) -> SentMedia:
    if isinstance(block.source, blocks.ImageElsewhere):
        message = "Images are read from sources of type 'base64' only: this server fetches none."
        raise bad_request(message, f"{param}.source", "unsupported_media")
    return SentMedia("image", block.source.data, f"{param}.source.data", bare=True)


def _text(parts: Sequence[Any], param: str, notes: Notes) -> str:
    texts = []
    for index, block in enumerate(parts):
        _note_block(block, notes)
        match block:
            case blocks.TextBlock():
                texts.append(block.text)
            case blocks.DocumentBlock(source=blocks.TextSource(data=data)):
                texts.append("\n".join(filter(None, (block.title, block.context, data))))
            case blocks.SearchResultBlock():
                texts.append("\n".join((block.title, block.source, *(part.text for part in block.content))))
            case blocks.ToolReferenceBlock():
                texts.append(f"Tool: {block.tool_name}")
            case blocks.ImageBlock():
                raise only_users_show(param)
            case blocks.DocumentBlock():
                raise unreadable(block.type, f"{param}[{index}]" if len(parts) > 1 else param)
            case _:
                raise bad_request(f"A block of type '{block.type}' has no place here.", param)
    return BETWEEN.join(texts)


def _note_block(block: blocks.Cacheable, notes: Notes) -> None:
    notes.fields(block, "cache_control", "citations", "caller", "toolset_name")
    if isinstance(block, blocks.ThinkingBlock) and block.signature not in (None, "", SIGNATURE):
        notes.unused("signature")
    for part in block.content if isinstance(block, blocks.SearchResultBlock) else ():
        _note_block(part, notes)


def _note_unused(request: CountRequest, notes: Notes) -> None:
    """What Claude Code and others always send, and what changes nothing here."""
    if request.mcp_servers:
        raise bad_request("'mcp_servers' is not supported: tools run on the client's side.", "mcp_servers")
    names = ("cache_control", "context_management", "speed", "thread", "metadata", "container", "inference_geo")
    notes.fields(request, *names, "diagnostics", "fallbacks", "safeguards")
    if getattr(request, "service_tier", None) not in (None, "auto", "standard_only"):
        notes.unused("service_tier")
    if request.output_config and request.output_config.task_budget:
        notes.unused("output_config.task_budget")
