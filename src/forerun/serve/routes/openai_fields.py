"""Fields that OpenAI's chat and text completions have in common, with their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, JsonValue, StringConstraints

from forerun.serve.chat_job import GenerationWish
from forerun.serve.dialects.fields import SpeculativeWish, sampling_of, speculation
from forerun.serve.errors import bad_request
from forerun.serve.routes.output_fields import OutputFields
from forerun.serve.routes.strict import Several, Strict
from forerun.text.stops import MAX_STOP_LENGTH

LARGEST = 2**31 - 1
MAX_BIASES = 4096
MAX_TOP_LOGPROBS = 20
DEFAULTS = {"temperature": 1.0}  # OpenAI's; all others are the sampler's own

Id = Annotated[int, Field(ge=0, le=LARGEST)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]

# Sent by many clients whatever they want; nothing here changes an answer, and the response's header names them.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")


class StreamOptions(Strict):
    """Of `stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(OutputFields):
    """What both kinds of completion take."""

    model: Name | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")],
                Annotated[FiniteFloat, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[Several[StopString], Field(max_length=1000)] | None = None
    stop_token_ids: Annotated[Several[Id], Field(max_length=1000)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    speculative: bool | int | Annotated[str, Field(max_length=50)] | SpeculativeWish | None = None
    return_token_details: bool | None = None
    skip_special_tokens: Literal[True] | None = None  # vLLM's clients send what is the only way here
    user: Annotated[str, Field(max_length=10_000)] | None = None
    metadata: Annotated[dict[str, JsonValue], Field(max_length=100)] | None = None
    store: bool | None = None
    service_tier: Annotated[str, Field(max_length=100)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1000)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1000)] | None = None

    @property
    def include_usage(self) -> bool:
        """Does a stream end with a chunk that has nothing but the usage?"""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Combinations that make no sense."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
        if self.stream_options and self.stream_options.include_obfuscation:
            raise bad_request("Obfuscated streams are not supported.", "stream_options.include_obfuscation")

    def warnings(self) -> Iterator[str]:
        """What was sent and changes nothing."""
        ignored = [name for name in WITHOUT_EFFECT if getattr(self, name) is not None]
        schema = self.response_format.json_schema if self.response_format else None
        if schema is not None and schema.description:
            ignored.append("response_format.json_schema.description")
        if ignored:
            yield f"without effect: {', '.join(ignored)}"

    def wish(self, **more: Any) -> GenerationWish:
        """In the pipeline's words; `more`: what each kind of completion calls by another name."""
        return GenerationWish(
            sampling=sampling_of(self),
            defaults=DEFAULTS,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            n=1 if self.n is None else self.n,
            speculation=speculation(self.speculative),
            output=self.output(),
            **more,
        )


def warning_header(warnings: Iterator[str]) -> dict[str, str]:
    """Names what was accepted without effect."""
    text = "; ".join(warnings)
    return {"X-Forerun-Warning": text} if text else {}
