"""From what a request wishes to what the engine runs: defaults resolved, every value checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forerun.engine.request import Request
from forerun.errors import ForerunError
from forerun.models.layers.media import PromptMedia
from forerun.policy.kinds import kind_of
from forerun.proof import plain_request
from forerun.sample.constraint import Constraint
from forerun.sample.grammar_text import GrammarLimits
from forerun.sample.parameters import SamplingParams, fresh_seed
from forerun.serve.chat_job import GenerationWish, SamplingWish
from forerun.serve.engine_client import Work
from forerun.serve.errors import ApiError, bad_request
from forerun.serve.model_service import LoadedModel
from forerun.serve.parsing.pieces import AnswerParser, PlainText
from forerun.serve.request_log import current_id
from forerun.serve.security import callers_salt
from forerun.serve.settings import ServeSettings
from forerun.text.answer import AnswerText


@dataclass(frozen=True, slots=True)
class PromptToRun:
    """Token ids, what they say, and what may follow them."""

    ids: Sequence[int]
    text: str  # the policy guesses the kind of work from it
    constraints: Sequence[Constraint | None] = ()  # one for each decoding; empty: none
    logprobs: bool = False  # of the prompt's own tokens too
    shown: frozenset[str] = frozenset()  # special tokens that are text in the answer
    media: PromptMedia | None = None  # what takes the place of placeholders
    written: Sequence[int] | None = None  # before placeholders were repeated: those would look like repetitive text
    parser: Callable[[], AnswerParser] = PlainText  # for the text of each choice


def grammar_limits(settings: ServeSettings) -> GrammarLimits:
    """On what is sent."""
    return GrammarLimits(characters=settings.max_schema)


def check_limits(wish: GenerationWish, settings: ServeSettings) -> None:
    """The limits that the administrator sets."""
    if not 1 <= wish.n <= settings.max_choices:
        raise bad_request(f"'n' must be from 1 to {settings.max_choices}, not {wish.n}.", "n")
    if len(wish.stop) > settings.max_stops:
        raise bad_request(f"At most {settings.max_stops} stop strings are allowed, not {len(wish.stop)}.", "stop")
    if wish.max_tokens is not None and wish.min_tokens > wish.max_tokens:
        message = f"'min_tokens' is {wish.min_tokens}, but at most {wish.max_tokens} tokens are allowed."
        raise bad_request(message, "min_tokens")


def check_characters(model: LoadedModel, characters: int, param: str) -> None:
    """Refuse what cannot fit without tokenising it: that would take long."""
    if characters > model.longest_prompt:
        raise too_long(model.context, characters // model.token_bytes.longest, param, "at least ")


def too_long(context: int, tokens: int, param: str, least: str = "") -> ApiError:
    """For a prompt that leaves no room for an answer. It begins with OpenAI's words: some clients know it by them."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens, for prompt and answer together. "
        f"The prompt has {least}{tokens}.",
        param=param,
        code="context_length_exceeded",
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def make_work(model: LoadedModel, wish: GenerationWish, prompt: PromptToRun, param: str) -> list[Work]:
    """One piece of work for each choice, then those of their proofs; `param`: the field that the prompt came in."""
    if len(prompt.ids) >= model.context:
        raise too_long(model.context, len(prompt.ids), param)
    constraints = prompt.constraints or [None] * wish.decodings
    try:
        requests = [_request(model, wish, prompt, sampling) for sampling in _samplings(model, wish)]
        requests += [plain_request(request) for request in requests[: wish.decodings - wish.n]]
        sinks = [
            AnswerText(model.tokenizer, prompt.ids, wish.stop, prompt.shown, keep_stop=wish.include_stop)
            for _ in requests
        ]
    except ForerunError as error:
        raise bad_request(str(error), _field_named(str(error))) from error
    parts = zip(requests, sinks, constraints, strict=True)
    return [Work(*part, progress=wish.progress and index == 0) for index, part in enumerate(parts)]


def _field_named(message: str) -> str | None:
    """Our own messages begin with the name of what is wrong."""
    names = (entry.name for entry in fields(SamplingWish))
    return next((name for name in names if message.startswith((name, f"the {name}"))), None)


def stop_ids_of(model: LoadedModel, wish: GenerationWish) -> frozenset[int]:
    """Tokens that end the answer."""
    if wish.stop_token_ids and max(wish.stop_token_ids) >= model.vocab:
        raise bad_request(f"Token ids end at {model.vocab - 1}.", "stop_token_ids")
    return frozenset(wish.stop_token_ids) | (frozenset() if wish.ignore_eos else model.stop_ids)


def _request(model: LoadedModel, wish: GenerationWish, prompt: PromptToRun, sampling: SamplingParams) -> Request:
    draft = wish.speculation.draft
    return Request(
        prompt=tuple(prompt.ids),
        sampling=sampling,
        max_tokens=wish.max_tokens,
        stop_strings=tuple(wish.stop),
        stop_ids=stop_ids_of(model, wish),
        draft=draft,
        draft_tokens=wish.speculation.depth,
        accept=wish.speculation.accept,
        name=current_id(),
        kind=kind_of(prompt.ids if prompt.written is None else prompt.written, prompt.text) if draft == "auto" else "",
        logprobs=wish.logprobs,
        prompt_logprobs=prompt.logprobs,
        media=prompt.media,
        cache_salt=callers_salt(wish.cache_salt),
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
