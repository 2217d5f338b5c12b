"""The model behind the server: absent while it loads, then everything the routes need of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.draft.arms import SERVED
from forerun.media.parts import MediaReader
from forerun.sample.grammar import GrammarVocabulary
from forerun.serve.engine_client import EngineClient, EngineState
from forerun.serve.errors import ApiError, try_later
from forerun.serve.parsing.formats import AnswerFormat, format_of
from forerun.serve.settings import ServeSettings
from forerun.text.content import MEDIA_KINDS
from forerun.text.template import read_template
from forerun.text.token_bytes import TokenBytes
from forerun.weights.tokenizer import turn_ends

if TYPE_CHECKING:
    from forerun.language_model import LanguageModel

log = logging.getLogger("forerun")

REASONS = {
    "loading": "Loading model",
    "draining": "The server is shutting down.",
    "broken": "The engine has failed: restart the server.",
}


@dataclass(kw_only=True)
class LoadedModel:
    """What a request needs of a model that is ready."""

    tokenizer: Any
    context: int  # tokens of prompt and answer together, as far as the cache holds them
    vocab: int
    stop_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # the model's and the server's own
    about: Mapping[str, Any] = field(default_factory=dict)  # for /props: device, drafters, memory
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    media: MediaReader | None = None  # None: it reads text only
    token_bytes: TokenBytes = field(init=False)
    format: AnswerFormat = field(init=False)  # how it writes thinking and tool calls

    def __post_init__(self) -> None:
        self.token_bytes = TokenBytes(self.tokenizer)
        self.format = format_of(self.tokenizer, tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)

    @property
    def modalities(self) -> list[str]:
        """What it reads."""
        return ["text", *(kind for kind in MEDIA_KINDS if self.media is not None and kind in self.media.kinds)]

    @property
    def longest_prompt(self) -> int:
        """Characters: a text with more has too many tokens whatever it says."""
        return self.context * self.token_bytes.longest

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """Its tokens as grammars see them, which takes up to a second to make."""
        return GrammarVocabulary(self.tokenizer, self.vocab, self.stop_ids)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that the server writes itself: marks in it are tokens of their own."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def loaded_model(model: LanguageModel, settings: ServeSettings) -> LoadedModel:
    """A model of this process; once, when it has been loaded."""
    engine = model.engine
    if settings.chat_template is not None:
        model.tokenizer.chat_template = read_template(Path(settings.chat_template))
    loaded = LoadedModel(
        tokenizer=model.tokenizer,
        context=engine.longest,
        vocab=engine.vocab,
        stop_ids=model.stop_ids | turn_ends(model.tokenizer),
        generation_defaults={**model.generation_defaults, **settings.sampling_defaults},
        about={
            "device": str(model.machine.device),
            "guaranteed": model.probe.guaranteed,
            "drafters": [name for name in SERVED if name in engine.drafters],
            "cache_tokens": engine.pool.count * engine.pool.page,
        },
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        media=model.media,
    )
    if settings.reasoning not in ("auto", "off") and loaded.format.reasoning == "none":
        log.warning("--reasoning %s has no effect: this model does not think", settings.reasoning)
    return loaded


class ModelService:
    """The model under the names clients may use. Until it is ready, and when it has to go, requests get 503."""

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        aliases: tuple[str, ...] = (),
        loaded: LoadedModel | None = None,
        *,
        listed: tuple[str, ...] = (),
        any_name: bool = False,
    ) -> None:
        """`listed`: names that /v1/models tells, the first one `name`; `any_name`: whatever a client calls it."""
        self.name, self.names, self._any_name = name, frozenset((name, *aliases)), any_name
        self.listed = listed or (name,)
        self.engine = engine
        self._loaded = loaded

    def ready(self, loaded: LoadedModel) -> None:
        """The model is there."""
        self._loaded = loaded

    def loaded(self) -> LoadedModel:
        """The model, or a 503 that says why there is none."""
        status = self.state().status
        if self._loaded is None or status != "ready":
            if status == "broken":
                raise ApiError(503, REASONS[status])
            raise try_later(503, REASONS.get(status, REASONS["loading"]))
        return self._loaded

    def state(self) -> EngineState:
        """How the engine is; it may be ready a little before all that belongs to the model."""
        state = self.engine.state()
        return replace(state, status="loading") if state.status == "ready" and self._loaded is None else state

    def check_name(self, model: str | None) -> None:
        """A request may name the model or leave that out; another name is not found here."""
        if model is not None and model not in self.names and not self._any_name:
            message = f"The model '{model[:100]}' does not exist here; '{self.name}' does."
            raise ApiError(404, message, param="model", code="model_not_found")
