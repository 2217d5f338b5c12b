"""Request fields that the dialects share, with their bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    model_validator,
)

from forerun.draft.arms import DRAFT_CHOICES, MAX_DEPTH
from forerun.options import AcceptChoice
from forerun.serve.chat_job import GenerationWish, SamplingWish, Speculation, ThinkingWish
from forerun.serve.dialects.harmless import is_harmless
from forerun.serve.dialects.notes import Notes
from forerun.serve.effort import switched
from forerun.serve.errors import bad_request
from forerun.serve.routes.strict import Several, Strict, known_names
from forerun.text.stops import MAX_STOP_LENGTH

LARGEST = 2**31 - 1
MAX_BIASES = 4096
DEFAULTS = {"temperature": 1.0}  # of all dialects; other defaults are the sampler's own

Id = Annotated[int, Field(ge=0, le=LARGEST)]
IdKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]  # a token id as the key of a JSON object
MAX_BIAS = 100.0
Bias = Annotated[FiniteFloat, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
PAIR = Field(min_length=2, max_length=2)
Limit = Annotated[int, Field(ge=-1, le=LARGEST)]  # tokens of an answer; -1: none but the context's
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]


class SpeculativeWish(Strict):
    """Who drafts, how far, how drafts are checked, and whether the answer is decoded again without them."""

    draft: str = "auto"
    depth: int | None = Field(default=None, ge=0, le=MAX_DEPTH)
    accept: AcceptChoice = "coupled"
    prove: bool = False


class RequestBody(Strict):
    """A whole body. Fields of other servers that cannot change the text are taken, and kept apart by their names."""

    _unused: list[str] = PrivateAttr(default_factory=list)
    _absent: list[str] = PrivateAttr(default_factory=list)  # names that are not known, with null

    @model_validator(mode="wrap")
    @classmethod
    def _without_harmless(cls, sent: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(sent, dict):
            return read(sent)
        others = {name: value for name, value in sent.items() if name not in known_names(cls)}
        unused = [name for name, value in others.items() if is_harmless(name, value)]
        body = read({name: value for name, value in sent.items() if name not in unused})
        body._unused, body._absent = unused, [name for name, value in others.items() if value is None]
        return body

    def note_harmless(self, notes: Notes, *, strict: bool) -> None:
        """Name them in the warning, or refuse the first one."""
        for name in (*self._absent, *self._unused) if strict else ():
            raise bad_request(f"'{name}' is not supported.", name, "unknown_parameter")
        for name in self._unused:
            notes.unused(name)


class SamplingFields(RequestBody):
    """How tokens are chosen, and when an answer ends: under the same names in all dialects."""

    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[IdKey, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[Several[Annotated[list[Id | Bias | Literal[False]], PAIR]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Several[Id], Field(max_length=1000)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1000)] | None = None
    speculative: bool | int | Annotated[str, Field(max_length=50)] | SpeculativeWish | None = None

    def wish(self, *, stop: str | Sequence[str] | None = None, **more: Any) -> GenerationWish:
        """In the pipeline's words; `more`: what each dialect calls by another name."""
        # By fields of the same names; what a body has no field for it does not say.
        said = {entry.name: getattr(self, entry.name, None) for entry in fields(SamplingWish)}
        return GenerationWish(
            sampling=SamplingWish(**said | {"logit_bias": self._biases() or None}),
            defaults=DEFAULTS,
            min_tokens=self.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            speculation=speculation(self.speculative),
            cache_salt=self.cache_salt or "",
            **more,
        )

    def _biases(self) -> dict[int, float]:
        """By token: as OpenAI's clients send them, or as a list of pairs, where false forbids the token."""
        if not isinstance(self.logit_bias, list):
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        biases = {}
        for index, (token, bias) in enumerate(self.logit_bias):
            if isinstance(token, bool) or not isinstance(token, int):
                raise bad_request("A pair of 'logit_bias' is a token id and its bias.", f"logit_bias[{index}][0]")
            if abs(bias) > MAX_BIAS:
                raise bad_request(f"A bias is from -{MAX_BIAS} to {MAX_BIAS}.", f"logit_bias[{index}][1]")
            biases[token] = -MAX_BIAS if bias is False else bias
        return biases


class Extras(SamplingFields):
    """What this server understands beside the fields of other APIs than OpenAI's completions."""

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

    def template(self, thinking: ThinkingWish) -> tuple[ThinkingWish, Mapping[str, Any]]:
        """And the options for the chat template."""
        options = dict(self.chat_template_kwargs or {})
        return switched(thinking, options), options


def limit(tokens: int | None) -> int | None:
    """-1 asks for no limit, as leaving it out does."""
    return None if tokens == -1 else tokens


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
    if wish.prove and wish.accept == "rejection":
        message = "'rejection' keeps the distribution and not the tokens, so there is nothing to 'prove': drop one."
        raise bad_request(message, "speculative.prove")
    return Speculation(wish.draft, wish.depth, wish.accept, wish.prove)
