"""GET /v1/models: the one model, in OpenAI's list and in the one Codex reads."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from forerun.serve.dialects.codex import codex_model
from forerun.serve.model_service import ModelService


def router(models: ModelService) -> APIRouter:
    """Lists and describes the model that is served."""
    routes = APIRouter(tags=["OpenAI"])
    created = int(time.time())

    def entry() -> dict[str, Any]:
        loaded = models.loaded()
        return {
            "id": models.name,
            "object": "model",
            "created": created,
            "owned_by": "forerun",
            "max_model_len": loaded.context,
            "input_modalities": loaded.modalities,
        }

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """All models: one."""
        found = entry()
        return {"object": "list", "data": [found], "models": [_for_codex(found)]}

    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        """One model by any of its names."""
        models.check_name(model)
        return entry()

    return routes


def _for_codex(entry: dict[str, Any]) -> dict[str, Any]:
    """It knows of text and images."""
    known = [kind for kind in entry["input_modalities"] if kind in ("text", "image")]
    return codex_model(entry["id"], entry["max_model_len"], known)
