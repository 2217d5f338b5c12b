"""From a request to /v1/responses to a chat job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.serve.chat_job import ChatJob, GenerationWish, OutputFormat, ThinkingWish, Tool, ToolChoice
from forerun.serve.dialects import responses_items as items
from forerun.serve.dialects.conversation import (
    Conversation,
    arguments_object,
    check_choice,
    check_names,
    only_users_show,
    unreadable,
)
from forerun.serve.dialects.fields import limit
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.responses_request import (
    AllowedTools,
    InputTokensRequest,
    ResponsesRequest,
    SchemaFormat,
    ToolChoiceFunction,
)
from forerun.serve.effort import thinking_for
from forerun.serve.errors import bad_request
from forerun.serve.routes.media_parts import AudioPart
from forerun.serve.sent_media import SentMedia, from_url
from forerun.text.content import BETWEEN

LOGPROBS = "message.output_text.logprobs"
OWN_NAMESPACE = "functions"  # where Codex keeps its own functions: they go by their plain names


@dataclass(slots=True)
class NamespacedTools:
    """The functions of a request, those inside namespaces under joined names."""

    tools: list[Tool] = field(default_factory=list)
    echoed: list[dict[str, Any]] = field(default_factory=list)  # as the client sent them
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # joined name: namespace and name

    def add(self, tools: Iterable[items.AnyTool], notes: Notes) -> None:
        """Functions, and functions in namespaces; the others are skipped."""
        for tool in tools:
            if isinstance(tool, items.FunctionTool):
                self._add(tool, tool.name, notes)
                self.echoed.append(tool.model_dump(exclude_unset=True))
            elif isinstance(tool, items.Namespace):
                inner = [one for one in tool.tools if isinstance(one, items.FunctionTool)]
                for one in inner:
                    name = joined(tool.name, one.name)
                    self.places[name] = (tool.name, one.name)
                    self._add(one, name, notes)
                if tool.description:
                    notes.unused(f"description of {tool.name}")
                if inner:
                    self.echoed.append(tool.model_dump(exclude_unset=True))
                for other in tool.tools:
                    if isinstance(other, items.OtherTool):
                        notes.unused(f"tool {tool.name}.{other.name or other.type}")
            else:
                notes.unused(f"tool {tool.type}" + (f" '{tool.name}'" if tool.name else ""))

    def _add(self, tool: items.FunctionTool, name: str, notes: Notes) -> None:
        notes.fields(tool, "defer_loading", "output_schema", "allowed_callers", under="tools.")
        self.tools.append(Tool(name, tool.description or "", tool.parameters or {}, bool(tool.strict)))


def joined(namespace: str | None, name: str) -> str:
    """A model knows functions by one name."""
    return name if namespace in (None, "", OWN_NAMESPACE) else f"{namespace}__{name}"


def make_job(request: InputTokensRequest, notes: Notes) -> tuple[ChatJob, NamespacedTools]:
    """The job, and which tools of the request it has."""
    _check(request, notes)
    declared = NamespacedTools()
    declared.add(request.tools or (), notes)
    conversation = Conversation()
    conversation.system(request.instructions or "")
    if isinstance(request.input, str):
        conversation.user(request.input)
    else:
        for index, item in enumerate(request.input or ()):
            _add_item(conversation, declared, item, f"input[{index}]", notes)
    conversation.end()
    if not any(message["role"] != "system" for message in conversation.messages):
        raise bad_request("'input' has nothing to answer.", "input")
    check_names(declared.tools)
    choice, tools = _choice(request, declared.tools, notes)
    thinking, options = request.template(_thinking(request, notes))
    return ChatJob(
        messages=conversation.messages,
        media=tuple(conversation.media),
        wish=_wish(request),
        tools=tools,
        tool_choice=check_choice(choice, tools),
        thinking=thinking,
        template_options=options,
        param="input",
    ), declared


def _wish(request: InputTokensRequest) -> GenerationWish:
    output = _output(request)
    if not isinstance(request, ResponsesRequest):
        return request.wish(output=output)
    return request.wish(
        max_tokens=limit(request.max_output_tokens),
        stop=request.stop,
        logprobs=_logprobs(request),
        output=output,
        progress=bool(request.stream and request.return_progress),
    )


def _logprobs(request: ResponsesRequest) -> int | None:
    if request.top_logprobs is not None:
        return request.top_logprobs
    return 0 if LOGPROBS in (request.include or ()) else None


def _output(request: InputTokensRequest) -> OutputFormat | None:
    wanted = request.text.format if request.text else None
    if isinstance(wanted, SchemaFormat):
        return OutputFormat("json_schema", wanted.schema_, "text.format")
    return OutputFormat("json_object", param="text.format") if wanted and wanted.type == "json_object" else None


def _thinking(request: InputTokensRequest, notes: Notes) -> ThinkingWish:
    options = request.reasoning
    if options is not None and options.context not in (None, "auto"):
        notes.unused("reasoning.context")
    thinking = thinking_for(options.effort) if options else ThinkingWish()
    budget = request.thinking_budget if isinstance(request, ResponsesRequest) else None
    return thinking if budget is None else ThinkingWish(thinking.enabled, budget)


def _choice(request: InputTokensRequest, tools: Sequence[Tool], notes: Notes) -> tuple[ToolChoice, Sequence[Tool]]:
    wanted, parallel = request.tool_choice, request.parallel_tool_calls is not False
    if isinstance(wanted, ToolChoiceFunction):
        return ToolChoice("named", wanted.name, parallel), tools
    if isinstance(wanted, AllowedTools):
        names, known = set(), {tool.name for tool in tools}
        for at, tool in enumerate(wanted.tools):
            name = tool.get("name")
            if not isinstance(name, str | None):
                raise bad_request("A tool's name must be text.", f"tool_choice.tools[{at}].name")
            names.add(name)
            if name not in known:
                notes.unused(f"tool_choice {name or tool.get('type')}")
        return ToolChoice(wanted.mode, parallel=parallel), [tool for tool in tools if tool.name in names]
    return ToolChoice(wanted or "auto", parallel=parallel), tools


def _add_item(conversation: Conversation, declared: NamespacedTools, item: Any, param: str, notes: Notes) -> None:
    if isinstance(item, items.Item):
        notes.fields(item, "phase", "caller", "encrypted_content")
    match item:
        case items.InputMessage(role="assistant"):
            conversation.says(_text(item.content, "", f"{param}.content", notes))
        case items.InputMessage(role="user"):
            _add_user(conversation, item.content, f"{param}.content", notes)
        case items.InputMessage():
            conversation.system(_text(item.content, BETWEEN, f"{param}.content", notes))
        case items.InputReasoning():
            conversation.thinks(_text(item.content or item.summary, BETWEEN, param, notes))
        case items.FunctionCall():
            name = joined(item.namespace, item.name)
            conversation.calls(item.call_id, name, arguments_object(item.arguments))
        case items.CustomToolCall():
            conversation.calls(item.call_id, joined(item.namespace, item.name), {"input": item.input})
        case items.CallOutput():
            text, media = _output_of(item.output, f"{param}.output", notes)
            name = joined(item.namespace, item.name) if item.name else ""
            conversation.result(item.call_id, text, media, name)
        case items.AdditionalTools():
            declared.add(item.tools, notes)
        case items.ItemReference():
            said = "This server keeps no items: send the items themselves, with 'store': false."
            raise bad_request(said, param, "unsupported_parameter")
        case _:
            notes.unused(f"input item {item.type}")


def _add_user(conversation: Conversation, content: str | Sequence[Any], param: str, notes: Notes) -> None:
    """A turn of the user's, or more of it, media where they stand."""
    for index, part in enumerate([content] if isinstance(content, str) else content):
        if isinstance(part, items.Media):
            conversation.shows(_media(part, f"{param}[{index}]", notes))
        else:
            conversation.user(part if isinstance(part, str) else _text([part], "", f"{param}[{index}]", notes))


def _output_of(output: str | Sequence[Any], param: str, notes: Notes) -> tuple[str, list[SentMedia]]:
    """What a tool gave: its text, and what it shows."""
    if isinstance(output, str):
        return output, []
    shown = [_media(part, f"{param}[{at}]", notes) for at, part in enumerate(output) if isinstance(part, items.Media)]
    return _text([part for part in output if not isinstance(part, items.Media)], BETWEEN, param, notes), shown


def _media(part: items.Media, param: str, notes: Notes) -> SentMedia:
    if isinstance(part, AudioPart):
        return part.sent(param)
    if isinstance(part, items.Video):
        return from_url("video", part.video_url, f"{param}.video_url")
    if part.image_url is None:
        message = "This server keeps no files: send the image as a data URI in 'image_url'."
        raise bad_request(message, f"{param}.file_id" if part.file_id else f"{param}.image_url", "unsupported_media")
    if part.detail not in (None, "auto"):
        notes.unused("input_image.detail")
    return from_url("image", part.image_url, f"{param}.image_url")


def _text(content: str | Sequence[Any], between: str, param: str, notes: Notes) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, items.Media):
            raise only_users_show(f"{param}[{index}]")
        if isinstance(part, items.Unreadable):
            raise unreadable(part.type, f"{param}[{index}]" if len(content) > 1 else param)
        notes.fields(part, "annotations", "logprobs")
        texts.append(part.refusal if isinstance(part, items.Refusal) else part.text)
    return between.join(texts)


def _check(request: InputTokensRequest, notes: Notes) -> None:
    """What cannot be had is refused; what clients always send, and what changes nothing here, is noted."""
    if request.previous_response_id is not None or request.conversation is not None:
        name = "conversation" if request.previous_response_id is None else "previous_response_id"
        raise bad_request(
            f"'{name}' is not supported: this server keeps no conversations. Send the whole input each time.",
            name,
            "unsupported_parameter",
        )
    if request.truncation == "auto":
        notes.unused("truncation")
    if request.text and request.text.verbosity not in (None, "medium"):
        notes.unused("text.verbosity")
    if request.text and isinstance(request.text.format, SchemaFormat):
        notes.fields(request.text.format, "description", under="text.format.")
    if isinstance(request, ResponsesRequest):
        _check_rest(request, notes)


def _check_rest(request: ResponsesRequest, notes: Notes) -> None:
    for name in ("background", "prompt"):
        if getattr(request, name):
            raise bad_request(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
    cache = ("prompt_cache_key", "prompt_cache_retention")
    notes.fields(request, "store", *cache, "safety_identifier", "user", "client_metadata")
    if not request.stream:
        notes.fields(request, "return_progress")
    if request.max_tool_calls is not None:
        notes.unused("max_tool_calls")
    if request.service_tier not in (None, "auto", "default"):
        notes.unused("service_tier")
    for value in request.include or ():
        if value != LOGPROBS:
            notes.unused(f"include {value}")
    if request.stream_options:
        asked = ("include_obfuscation", "reasoning_summary_delivery")
        notes.fields(request.stream_options, *asked, under="stream_options.")
