"""How the server is: health, state, properties, version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from forerun import __version__
from forerun.sample.parameters import SamplingParams
from forerun.serve.dialects.fields import DEFAULTS
from forerun.serve.model_service import REASONS, ModelService
from forerun.serve.settings import ServeSettings
from forerun.weights.generation_config import RANGES


def holding(defaults: Mapping[str, float]) -> dict[str, float]:
    """What holds for a request that says nothing: of the server or the model, else of OpenAI, else of the sampler."""
    sampler = SamplingParams()
    return {name: getattr(sampler, name) for name in RANGES} | DEFAULTS | dict(defaults)


def router(models: ModelService, settings: ServeSettings, metrics: Callable[[], bytes] | None) -> APIRouter:
    """For whoever watches the server. `metrics`: the text that Prometheus reads."""
    routes = APIRouter(tags=["service"])

    @routes.get("/health", response_model=None)
    @routes.get("/v1/health", response_model=None)
    @routes.get("/ready", response_model=None)
    @routes.head("/health", response_model=None, include_in_schema=False)  # what some monitors ask
    @routes.head("/v1/health", response_model=None, include_in_schema=False)
    @routes.head("/ready", response_model=None, include_in_schema=False)
    async def health() -> Response:
        """200 when requests are served; else 503 and why."""
        status = models.state().status
        if status == "ready":
            return JSONResponse({"status": "ok"})
        error = {"code": 503, "message": REASONS[status], "type": "unavailable_error"}
        return JSONResponse({"error": error}, 503)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Of forerun."""
        return {"version": __version__}

    @routes.get("/stats")
    async def stats() -> dict[str, Any]:
        """The engine at this moment."""
        return asdict(models.state())

    @routes.get("/props")
    async def props() -> dict[str, Any]:
        """The model and the settings it is served with."""
        loaded = models.loaded()
        shown = {
            entry.name: getattr(settings, entry.name) for entry in fields(settings) if not entry.metadata.get("secret")
        }
        return {
            "model": models.name,
            "context": loaded.context,
            "vocabulary": loaded.vocab,
            "generation_defaults": holding(loaded.generation_defaults),
            # llama.cpp's names, and video, which it does not know.
            "modalities": {
                name: kind in loaded.modalities
                for name, kind in (("vision", "image"), ("video", "video"), ("audio", "audio"))
            },
            "chat_template": str(loaded.tokenizer.chat_template or ""),
            "version": __version__,
            "settings": shown,
            **loaded.about,
        }

    if metrics is not None:

        @routes.get("/metrics", response_class=Response)
        async def prometheus() -> Response:
            """Counters, gauges and histograms under vLLM's names."""
            return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    return routes
