"""The model behind the server: absent while it loads, then everything the routes need of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.serve.engine_client import EngineClient, EngineState
from forerun.serve.errors import ApiError
from forerun.serve.parsing.formats import AnswerFormat, format_of
from forerun.text.token_bytes import TokenBytes

REASONS = {
    "loading": "Loading model",
    "draining": "The server is shutting down.",
    "broken": "The engine has failed: restart the server.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a request needs of a model that is ready."""

    tokenizer: Any
    context: int  # tokens of prompt and answer together
    vocab: int
    stop_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json
    about: Mapping[str, Any] = field(default_factory=dict)  # for /props: device, drafters, memory
    token_bytes: TokenBytes = field(init=False)
    format: AnswerFormat = field(init=False)  # how it writes thinking and tool calls

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", TokenBytes(self.tokenizer))
        object.__setattr__(self, "format", format_of(self.tokenizer))

    @property
    def longest_prompt(self) -> int:
        """Characters: a text with more has too many tokens whatever it says."""
        return self.context * self.token_bytes.longest


class ModelService:
    """The model under the names clients may use. Until it is ready, and when it has to go, requests get 503."""

    def __init__(
        self, name: str, engine: EngineClient, aliases: tuple[str, ...] = (), loaded: LoadedModel | None = None
    ) -> None:
        self.name, self.names = name, frozenset((name, *aliases))
        self.engine = engine
        self._loaded = loaded

    def ready(self, loaded: LoadedModel) -> None:
        """The model is there."""
        self._loaded = loaded

    def loaded(self) -> LoadedModel:
        """The model, or a 503 that says why there is none."""
        status = self.state().status
        if self._loaded is None or status != "ready":
            headers = {} if status == "broken" else {"Retry-After": "5"}
            raise ApiError(503, REASONS.get(status, REASONS["loading"]), headers=headers)
        return self._loaded

    def state(self) -> EngineState:
        """How the engine is."""
        return self.engine.state()

    def check_name(self, model: str | None) -> None:
        """A request may name the model or leave that out; another name is not found here."""
        if model is not None and model not in self.names:
            message = f"The model '{model[:100]}' does not exist here; '{self.name}' does."
            raise ApiError(404, message, param="model", code="model_not_found")
