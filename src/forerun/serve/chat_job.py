"""What a request asks for, whichever dialect it came in: the one form that the chat pipeline understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.options import AcceptChoice
from forerun.serve.sent_media import SentMedia

OutputKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """May it call tools, must it, and which?"""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""  # with "named"
    parallel: bool = True  # more than one call in an answer


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the answer must look like; thinking comes before it and is free."""

    kind: OutputKind
    value: Any = None  # the schema, the expression, the list of choices or the Lark grammar
    param: str = "response_format"  # the field that it came in, for errors


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """Whether the model thinks first, and for how many tokens at most. None: as its template and it like."""

    enabled: bool | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWish:
    """None: as generation_config.json says, and where it says nothing as the dialect does (see `ChatJob.defaults`)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts and how far; None: measured time decides how far."""

    draft: str = "auto"  # auto, off, or an arm's name
    depth: int | None = None
    accept: AcceptChoice = "coupled"
    prove: bool = False  # decode the answer again without drafts, and compare


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationWish:
    """What chat and text completions have in common."""

    sampling: SamplingWish = field(default_factory=SamplingWish)
    defaults: Mapping[str, float] = field(default_factory=dict)  # of the dialect: {"temperature": 1.0}
    max_tokens: int | None = None  # 0: the prompt is read, and nothing said
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False  # a stop string that was found is part of the text
    ignore_eos: bool = False
    n: int = 1
    progress: bool = False  # tell how much of the prompt has been read
    logprobs: int | None = None  # None: none; 0: of the tokens chosen; k: of the k likeliest as well
    speculation: Speculation = field(default_factory=Speculation)
    output: OutputFormat | None = None
    cache_salt: str = ""  # only prompts with the same one share what was computed for their beginnings

    @property
    def decodings(self) -> int:
        """Of the choices, and once more of each where they are to be proved."""
        return 2 * self.n if self.speculation.prove else self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """A conversation to go on with."""

    # As chat templates take them: role, content, reasoning_content, tool_calls, tool_call_id, name. A content is text,
    # or in turns of the user a list of text parts and places of media. Arguments of tool calls are objects, not text.
    messages: Sequence[Mapping[str, Any]]
    media: tuple[SentMedia, ...] = ()  # one for each place, in order
    wish: GenerationWish = field(default_factory=GenerationWish)
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: ThinkingWish = field(default_factory=ThinkingWish)
    template_options: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs, checked
    continue_last: bool = False  # the last message is the assistant's own beginning: no new turn
    new_turn: bool = True  # the prompt ends with the beginning of the assistant's turn
    param: str = "messages"  # the field that the conversation came in, for errors
