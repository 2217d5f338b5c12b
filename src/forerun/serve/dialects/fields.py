"""Request fields that the dialects share: our own extras at the top level of a body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from forerun.draft.arms import DRAFT_CHOICES, MAX_DEPTH
from forerun.serve.chat_job import GenerationWish, OutputFormat, SamplingWish, Speculation, Thinking
from forerun.serve.effort import switched
from forerun.serve.errors import bad_request
from forerun.serve.routes.strict import Several, Strict

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a token id as the key of a JSON object


class SpeculativeWish(Strict):
    """Who drafts, and how far."""

    draft: str = "auto"
    depth: int | None = Field(default=None, ge=0, le=MAX_DEPTH)


class Extras(Strict):
    """What this server understands beside the dialect's own fields, at the top level of the body."""

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[TokenKey, float] | None = Field(default=None, max_length=4096)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: Several[TokenId] = Field(default_factory=list, max_length=64)
    speculative: bool | int | str | SpeculativeWish | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_json(cls, body: Any) -> Any:
        """Parts of a body are echoed and rendered: what is no JSON to others must not get that far."""
        if isinstance(body, bytes):  # it came as something else than JSON, and is refused as such
            return body
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise ValueError("The body must be plain JSON: finite numbers, whole characters, not too deep.") from None
        return body

    def wish(
        self,
        *,
        max_tokens: int | None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        output: OutputFormat | None = None,
    ) -> GenerationWish:
        """Ours, with what the dialect says in its own words. Both dialects are at temperature 1 when nobody says."""
        return GenerationWish(
            sampling=sampling_of(self),
            defaults={"temperature": 1.0},
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            speculation=speculation(self.speculative),
            output=output,
        )

    def template(self, thinking: Thinking) -> tuple[Thinking, Mapping[str, Any]]:
        """And the options for the chat template."""
        options = dict(self.chat_template_kwargs or {})
        return switched(thinking, options), options


def sampling_of(body: BaseModel) -> SamplingWish:
    """By fields of the same names; what a body has no field for it does not say."""
    said = {entry.name: getattr(body, entry.name, None) for entry in fields(SamplingWish)}
    biases = said["logit_bias"] or {}
    return SamplingWish(**said | {"logit_bias": {int(token): bias for token, bias in biases.items()} or None})


def speculation(value: bool | int | str | SpeculativeWish | None) -> Speculation:
    """`off`, `auto`, the name of a drafter, or a number of drafts per round; or both, as an object."""
    wish = value if isinstance(value, SpeculativeWish) else SpeculativeWish()
    if isinstance(value, bool):
        wish = SpeculativeWish(draft="auto" if value else "off")
    elif isinstance(value, str):
        wish = SpeculativeWish(draft=value)
    elif isinstance(value, int):
        if not 0 <= value <= MAX_DEPTH:
            raise bad_request(f"'speculative' must be a depth from 0 to {MAX_DEPTH}, not {value}.", "speculative")
        wish = SpeculativeWish(draft="auto" if value else "off", depth=value or None)
    if wish.draft not in DRAFT_CHOICES:
        names = ", ".join(DRAFT_CHOICES)
        raise bad_request(f"'speculative' must be a depth or one of {names}, not '{wish.draft}'.", "speculative")
    if wish.draft == "off" and wish.depth:
        raise bad_request("'speculative' is off, so it has no depth.", "speculative.depth")
    return Speculation(wish.draft, wish.depth)
