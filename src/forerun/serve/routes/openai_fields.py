"""Fields that OpenAI's chat and text completions have in common, with their bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, StringConstraints

from forerun.serve.chat_job import GenerationWish
from forerun.serve.dialects.fields import LARGEST, SamplingFields, StopString
from forerun.serve.dialects.notes import Notes
from forerun.serve.routes.output_fields import OutputFields
from forerun.serve.routes.strict import Json, Several, Strict

MAX_TOP_LOGPROBS = 20

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]

# Sent by many clients whatever they want; nothing here changes an answer, and the response's header names them.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")


class StreamOptions(Strict):
    """Of `stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(OutputFields, SamplingFields):
    """What both kinds of completion take."""

    model: Name | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[Several[StopString], Field(max_length=1000)] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_details: bool | None = None
    return_progress: bool | None = None
    skip_special_tokens: Literal[True] | None = None  # vLLM's clients send what is the only way here
    user: Annotated[str, Field(max_length=10_000)] | None = None
    metadata: Annotated[dict[str, Json], Field(max_length=100)] | None = None
    store: bool | None = None
    service_tier: Annotated[str, Field(max_length=100)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1000)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1000)] | None = None

    @property
    def include_usage(self) -> bool:
        """Does a stream end with a chunk that has nothing but the usage?"""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def note_unused(self, notes: Notes) -> None:
        """What was sent and changes nothing."""
        notes.fields(self, *WITHOUT_EFFECT, *(() if self.stream else ("stream_options", "return_progress")))
        if self.stream and self.stream_options:
            notes.fields(self.stream_options, "include_obfuscation", under="stream_options.")
        if self.response_format and self.response_format.json_schema:
            notes.fields(self.response_format.json_schema, "description", under="response_format.json_schema.")

    def wish(self, **more: Any) -> GenerationWish:
        return super().wish(
            stop=self.stop,
            include_stop=bool(self.include_stop_str_in_output),
            n=1 if self.n is None else self.n,
            progress=bool(self.stream and self.return_progress),
            output=self.output(),
            **more,
        )
