"""Every field that items, blocks and tools of the dialects may have is used, refused, or named in a warning header."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from forerun.serve.dialects import messages_blocks, messages_job, responses_items, responses_job
from forerun.serve.dialects.messages_request import CountRequest
from forerun.serve.dialects.notes import HEADER, Notes
from forerun.serve.dialects.responses_request import InputTokensRequest
from forerun.serve.errors import ApiError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER = {"role": "user", "content": "Hello"}
CACHED = {"cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
TOOL = {"name": "f", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "A text.", "media_type": "text/plain"}}
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}


Case = tuple[dict[str, Any], str, str]  # what is sent, the field in question, what the header calls it
TEXT = {"type": "text", "text": "x"}
THINKING = {"type": "thinking", "thinking": "Hm."}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}


def items(*more: dict[str, Any]) -> dict[str, Any]:
    return {"input": [USER, *more]}


def said(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": "x", **more}]}


def functions(*tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input": "Hi", "tools": list(tools), **more}


def namespace(**more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "n", "tools": [FUNCTION], **more}


DIRECT = {"caller": {"type": "direct"}}
FORMAT = {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
RESPONSES: list[Case] = [
    (items({"role": "user", "content": [PICTURE]}), "Image.detail", "input_image.detail"),
    (items(said(annotations=[{"type": "url_citation"}])), "InputText.annotations", "annotations"),
    (items(said(logprobs=[{"token": "x"}])), "InputText.logprobs", "logprobs"),
    (items(said(prompt_cache_breakpoint={})), "", "prompt_cache_breakpoint"),
    (items({**USER, "phase": "commentary"}), "InputMessage.phase", "phase"),
    (items({**CALL, **DIRECT}), "FunctionCall.caller", "caller"),
    (items(CALL, {**OUTPUT, **DIRECT}), "CallOutput.caller", "caller"),
    (items({**THOUGHT, "encrypted_content": "gAAA"}), "InputReasoning.encrypted_content", "encrypted_content"),
    (functions({**FUNCTION, "defer_loading": True}), "FunctionTool.defer_loading", "tools.defer_loading"),
    (functions({**FUNCTION, "output_schema": SCHEMA}), "FunctionTool.output_schema", "tools.output_schema"),
    (functions({**FUNCTION, "allowed_callers": ["a"]}), "FunctionTool.allowed_callers", "tools.allowed_callers"),
    (functions(namespace(description="d")), "Namespace.description", "description of n"),
    (functions(namespace(tools=[{**FUNCTION, "defer_loading": True}])), "", "tools.defer_loading"),
    (functions({"type": "web_search"}), "OtherTool.type", "tool web_search"),
    (functions({"type": "custom", "name": "patch"}), "OtherTool.name", "tool custom 'patch'"),
    (items({"type": "mcp_call", "output": "x"}), "ForeignItem.type", "input item mcp_call"),
    ({"input": "Hi", "text": {"format": FORMAT}}, "", "text.format.description"),
    (functions(FUNCTION, tool_choice=ALLOWED), "", "tool_choice mcp"),
]


def says(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}]}


def asks(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def changes(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    block = {"type": "tool_addition", "tool": tool, **more}
    return {"messages": [USER, {"role": "system", "content": [block]}], "tools": [TOOL]}


def defines(**more: Any) -> dict[str, Any]:
    return changes({"type": "tool_definition", "definition": {**TOOL, "name": "g", **more}})


def tools(*given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": list(given), **more}


CITED = {"citations": {"enabled": True}}
KEPT = [says({**block, **CACHED}) for block in (TEXT, THINKING, USE, HIDDEN, {"type": "server_tool_use"})]
KEPT += [asks({**block, **CACHED}) for block in (RESULT, DOCUMENT, FOUND, REFERENCE)]
KEPT += [asks({**block, "content": [{**TEXT, **CACHED}]}) for block in (RESULT, FOUND)]
KEPT += [defines(**CACHED), changes({"type": "tool_reference", "name": "f"}, **CACHED)]
MESSAGES: list[Case] = [
    *((body, "Cacheable.cache_control", "cache_control") for body in KEPT),
    (says({**TEXT, "citations": [{}]}), "TextBlock.citations", "citations"),
    (asks({**DOCUMENT, **CITED}), "DocumentBlock.citations", "citations"),
    (asks({**FOUND, **CITED}), "SearchResultBlock.citations", "citations"),
    (says({**THINKING, "signature": "EqQB"}), "ThinkingBlock.signature", "signature"),
    (says(HIDDEN), "RedactedThinkingBlock.data", "content block redacted_thinking"),
    (says({**USE, **DIRECT}), "ToolUseBlock.caller", "caller"),
    (says({**USE, "toolset_name": "s"}), "ToolUseBlock.toolset_name", "toolset_name"),
    (asks({**RESULT, "toolset_name": "s"}), "ToolResultBlock.toolset_name", "toolset_name"),
    (says({"type": "mcp_tool_use"}), "ForeignBlock.type", "content block mcp_tool_use"),
    (tools({**TOOL, "eager_input_streaming": True}), "CustomTool.eager_input_streaming", "tools.eager_input_streaming"),
    (tools({**TOOL, "defer_loading": True}), "CustomTool.defer_loading", "tools.defer_loading"),
    (tools({**TOOL, "input_examples": [{}]}), "CustomTool.input_examples", "tools.input_examples"),
    (tools({**TOOL, "allowed_callers": ["direct"]}), "CustomTool.allowed_callers", "tools.allowed_callers"),
    (defines(defer_loading=True), "", "tools.defer_loading"),
    (tools({"type": "bash_20250124", "name": "bash"}), "ServerTool.type", "tool bash_20250124"),
    (changes({"type": "mcp_toolset"}), "McpReference.type", "tool_addition mcp_toolset"),
    (tools(TOOL, tool_choice={"type": "auto", "name": "f"}), "", "tool_choice.name"),
    ({"messages": [USER], "thinking": {"type": "disabled", "budget_tokens": 9}}, "", "thinking.budget_tokens"),
]
USED = {
    "InputText.type", "InputText.text", "Refusal.type", "Refusal.refusal", "Image.type", "Image.image_url",
    "Image.file_id",
    "Audio.type", "Audio.input_audio", "Video.type", "Video.video_url", "Unreadable.type", "InputMessage.type",
    "InputMessage.role", "InputMessage.content", "FunctionCall.type", "FunctionCall.call_id", "FunctionCall.name",
    "FunctionCall.arguments",
    "FunctionCall.namespace", "CustomToolCall.type", "CustomToolCall.call_id", "CustomToolCall.name",
    "CustomToolCall.input", "CustomToolCall.namespace", "CallOutput.type", "CallOutput.call_id", "CallOutput.output",
    "CallOutput.name", "CallOutput.namespace", "InputReasoning.type", "InputReasoning.summary",
    "InputReasoning.content",
    "FunctionTool.type", "FunctionTool.name", "FunctionTool.description", "FunctionTool.parameters",
    "FunctionTool.strict", "Namespace.type", "Namespace.name", "Namespace.tools", "AdditionalTools.type",
    "AdditionalTools.tools", "ItemReference.type", "TextBlock.type", "TextBlock.text", "TextSource.type",
    "TextSource.data", "TextSource.media_type", "OtherSource.type", "DocumentBlock.type", "DocumentBlock.source",
    "DocumentBlock.title", "DocumentBlock.context", "SearchResultBlock.type", "SearchResultBlock.source",
    "SearchResultBlock.title", "SearchResultBlock.content", "ImageBlock.type", "ImageBlock.source",
    "ImageData.type", "ImageData.media_type", "ImageData.data", "ImageElsewhere.type", "ToolReferenceBlock.type",
    "ToolReferenceBlock.tool_name", "ThinkingBlock.type", "ThinkingBlock.thinking", "RedactedThinkingBlock.type",
    "ToolUseBlock.type", "ToolUseBlock.id", "ToolUseBlock.name", "ToolUseBlock.input", "ToolResultBlock.type",
    "ToolResultBlock.tool_use_id", "ToolResultBlock.content", "ToolResultBlock.is_error", "CustomTool.type",
    "CustomTool.name", "CustomTool.description", "CustomTool.input_schema", "CustomTool.strict", "ServerTool.name",
    "InlineTool.type", "InlineTool.definition", "ToolName.type", "ToolName.name", "ToolChangeBlock.type",
    "ToolChangeBlock.tool",
}  # fmt: skip
# What the server itself sends, with nothing in it to use: every client sends it back.
SENT_BACK = {"Item.id", "Item.status", "AdditionalTools.role"}


def warning(module: Any, kind: type[Any], body: dict[str, Any]) -> str:
    notes = Notes()
    module.make_job(kind.model_validate(body), notes)
    return notes.headers().get(HEADER, "").removeprefix("not used: ")


def names(cases: list[Case]) -> list[str]:
    return [f"{number} {name}" for number, (*_, name) in enumerate(cases)]


@pytest.mark.parametrize(("body", "field", "name"), RESPONSES, ids=names(RESPONSES))
def test_responses_name_what_has_no_effect(body: dict[str, Any], field: str, name: str) -> None:
    assert warning(responses_job, InputTokensRequest, body).split(", ") == [name]


@pytest.mark.parametrize(("body", "field", "name"), MESSAGES, ids=names(MESSAGES))
def test_messages_name_what_has_no_effect(body: dict[str, Any], field: str, name: str) -> None:
    assert name in warning(messages_job, CountRequest, {"model": "m", **body}).split(", ")


@pytest.mark.parametrize("module", [responses_items, messages_blocks])
def test_no_field_was_forgotten(module: ModuleType) -> None:
    """One that is added must be used or named."""
    known = USED | SENT_BACK | {field for _, field, _ in (*RESPONSES, *MESSAGES)}
    models = [thing for thing in vars(module).values() if isinstance(thing, type) and issubclass(thing, BaseModel)]
    own = [model for model in models if model.__module__ == module.__name__]
    assert len(own) > 10
    for model in own:
        inherited = {name for base in model.__mro__[1:] for name in getattr(base, "__annotations__", {})}
        for name in set(model.model_fields) - inherited:
            assert f"{model.__name__}.{name}" in known


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{**USER, "id": "msg_1", "status": "completed"}, said(annotations=[], logprobs=[]), USER]},
        {"input": [USER, CALL, OUTPUT], "tools": [{**FUNCTION, "strict": False, "defer_loading": False}]},
    ],
)
def test_what_the_server_itself_sends_is_no_news(body: dict[str, Any]) -> None:
    assert warning(responses_job, InputTokensRequest, body) == ""


def test_thoughts_of_this_server_come_back_with_its_own_signature() -> None:
    from forerun.serve.dialects.messages_events import SIGNATURE

    for signature in ("", SIGNATURE):
        block = {"type": "thinking", "thinking": "Hm.", "signature": signature}
        turns = [USER, {"role": "assistant", "content": [block]}, USER]
        assert warning(messages_job, CountRequest, {"model": "m", "messages": turns}) == ""


def test_a_result_may_name_its_tool_itself() -> None:
    """Where the call is not in the conversation any more."""
    body = {"input": [USER, {**OUTPUT, "name": "f", "namespace": "n"}]}
    job, _ = responses_job.make_job(InputTokensRequest.model_validate(body), Notes())
    assert job.messages[-1] == {"role": "tool", "tool_call_id": "a", "content": "x", "name": "n__f"}


def test_documents_that_are_no_plain_text_are_refused() -> None:
    source = {"type": "text", "data": "%PDF", "media_type": "application/pdf"}
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}
    with pytest.raises((ApiError, ValueError), match="text/plain"):
        messages_job.make_job(CountRequest.model_validate(body), Notes())


def test_a_header_ends_with_no_space() -> None:
    """Servers refuse such a header, and the answer with it."""
    notes = Notes()
    notes.unused("one")
    notes.unused(" ")
    assert notes.headers()[HEADER] == "not used: one,"
