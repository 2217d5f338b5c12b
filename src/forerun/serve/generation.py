"""From what a request wishes to what the engine runs: defaults resolved, every value checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from forerun.engine.request import Request
from forerun.errors import ForerunError
from forerun.policy.kinds import kind_of
from forerun.sample.constraint import Constraint
from forerun.sample.parameters import SamplingParams, fresh_seed
from forerun.serve.chat_job import GenerationWish, SamplingWish
from forerun.serve.engine_client import Work
from forerun.serve.errors import ApiError, bad_request
from forerun.serve.model_service import LoadedModel
from forerun.serve.settings import ServeSettings
from forerun.text.answer import AnswerText


@dataclass(frozen=True, slots=True)
class PromptToRun:
    """Token ids, and what they say: the policy guesses the kind of work from it."""

    tokens: Sequence[int]
    text: str = ""
    constraints: Sequence[Constraint | None] = ()  # one for each choice; empty: none
    hidden_stops: frozenset[int] = field(default_factory=frozenset)


def check_limits(wish: GenerationWish, settings: ServeSettings) -> None:
    """The limits that the administrator sets."""
    if not 1 <= wish.n <= settings.max_choices:
        raise bad_request(f"'n' must be from 1 to {settings.max_choices}, not {wish.n}.", "n")
    if len(wish.stop) > settings.max_stops:
        raise bad_request(f"At most {settings.max_stops} stop strings are allowed, not {len(wish.stop)}.", "stop")


def check_room(model: LoadedModel, prompt: int) -> None:
    """A prompt that leaves no room for a token can never be answered."""
    if prompt >= model.context:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens, but the context has room for {model.context} with the answer.",
            param="messages",
            code="context_length_exceeded",
            n_prompt_tokens=prompt,
            n_ctx=model.context,
        )


def make_work(model: LoadedModel, wish: GenerationWish, prompt: PromptToRun) -> list[Work]:
    """One piece of work for each choice."""
    check_room(model, len(prompt.tokens))
    constraints = prompt.constraints or [None] * wish.n
    try:
        requests = [_request(model, wish, prompt, sampling) for sampling in _samplings(model, wish)]
        sinks = [AnswerText(model.tokenizer, prompt.tokens, wish.stop, keep_stop=wish.include_stop) for _ in requests]
        return [Work(*parts) for parts in zip(requests, sinks, constraints, strict=True)]
    except ForerunError as error:
        raise bad_request(str(error)) from error


def _request(model: LoadedModel, wish: GenerationWish, prompt: PromptToRun, sampling: SamplingParams) -> Request:
    room = model.context - len(prompt.tokens)
    draft = wish.speculation.draft
    return Request(
        prompt=tuple(prompt.tokens),
        sampling=sampling,
        max_tokens=room if wish.max_tokens is None else min(wish.max_tokens, room),
        stop_strings=tuple(wish.stop),
        stop_ids=frozenset(wish.stop_token_ids) | (frozenset() if wish.ignore_eos else model.stop_ids),
        draft=draft,
        draft_tokens=wish.speculation.depth,
        kind=kind_of(list(prompt.tokens), prompt.text) if draft == "auto" else "",
        logprobs=wish.logprobs,
    )


def _samplings(model: LoadedModel, wish: GenerationWish) -> list[SamplingParams]:
    """Each choice has noise of its own from the one seed."""
    values: dict[str, Any] = {
        name: value
        for name in (entry.name for entry in fields(SamplingWish))
        if (value := _resolved(name, model, wish)) is not None
    }
    seed = values.pop("seed", None)
    values["seed"] = fresh_seed() if seed is None else int(seed) % 2**64  # OpenAI's seeds may be negative
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))  # -1 means all, as 0 does
    samplings = [SamplingParams(**values, choice=choice) for choice in range(wish.n)]
    samplings[0].check_vocabulary(model.vocab)
    return samplings


def _resolved(name: str, model: LoadedModel, wish: GenerationWish) -> Any:
    """The request's word, else the model's, else the dialect's."""
    for value in (getattr(wish.sampling, name), model.generation_defaults.get(name), wish.defaults.get(name)):
        if value is not None:
            return value
    return None
