"""The model behind the server: absent while it loads, then everything the routes need of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.serve.engine_client import EngineClient, EngineState
from forerun.serve.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a request needs of a model that is ready."""

    engine: EngineClient
    tokenizer: Any
    context: int  # tokens of prompt and answer together
    vocab: int
    stop_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json
    about: Mapping[str, Any] = field(default_factory=dict)  # for /props: device, drafters, memory


class ModelService:
    """Holds the model once it is there. Until then, and when it has to go, requests get 503."""

    def __init__(self, name: str, aliases: tuple[str, ...] = (), loaded: LoadedModel | None = None) -> None:
        """`name`: what clients call the model; `aliases`: other names for it, the last part of its path among them."""
        self.name, self.names = name, frozenset((name, *aliases))
        self._loaded = loaded
        self._broken = self._draining = False

    def ready(self, loaded: LoadedModel) -> None:
        """The model is there."""
        self._loaded = loaded

    def broken(self) -> None:
        """It could not be loaded, or cannot go on."""
        self._broken = True

    def drain(self) -> None:
        """Finish what is under way; nothing new."""
        self._draining = True

    def loaded(self) -> LoadedModel:
        """The model, or a 503 that says why there is none."""
        status = self.state().status
        if self._loaded is None or status != "ready":
            headers = {"Retry-After": "5"} if status == "loading" else {}
            raise ApiError(503, REASONS.get(status, "The model is not ready."), code="503", headers=headers)
        return self._loaded

    def state(self) -> EngineState:
        """How the engine is, whether or not there is one yet."""
        state = self._loaded.engine.state() if self._loaded else EngineState(status="loading")
        if self._broken:
            return replace(state, status="broken")
        return replace(state, status="draining") if self._draining and state.status != "broken" else state

    def check_name(self, model: str | None) -> None:
        """A request may name the model or leave that out; another name is not found here."""
        if model is not None and model not in self.names:
            shown = model[:100]
            raise ApiError(
                404,
                f"The model '{shown}' does not exist here; '{self.name}' does.",
                param="model",
                code="model_not_found",
            )


REASONS = {
    "loading": "Loading model",
    "draining": "The server is shutting down.",
    "broken": "The engine has failed: restart the server.",
}
