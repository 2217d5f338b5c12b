"""GET /v1/models: the one model, in OpenAI's list and in the one Codex reads."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from forerun.serve.model_service import ModelService

LONGEST_OUTPUT = 10_000  # tokens of a tool's output that Codex keeps


def router(models: ModelService) -> APIRouter:
    """Lists and describes the model that is served."""
    routes = APIRouter(tags=["OpenAI"])
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        loaded = models.loaded()
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "forerun",
            "max_model_len": loaded.context,
            "input_modalities": loaded.modalities,
        }

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The model under each of the names it is served by."""
        found = [entry(name) for name in models.listed]
        return {"object": "list", "data": found, "models": [_for_codex(one) for one in found]}

    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        """One model by any of its names."""
        models.check_name(model)
        return entry(models.name)

    return routes


def _for_codex(entry: dict[str, Any]) -> dict[str, Any]:
    """All fields without which Codex reads nothing. From the context it knows when to shorten a conversation."""
    return {
        "slug": entry["id"],
        "display_name": entry["id"],
        "description": "Served by forerun",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "context_window": entry["max_model_len"],
        "input_modalities": [kind for kind in entry["input_modalities"] if kind in ("text", "image")],  # all it knows
        "shell_type": "shell_command",
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "truncation_policy": {"mode": "tokens", "limit": min(LONGEST_OUTPUT, entry["max_model_len"] // 4)},
    }
