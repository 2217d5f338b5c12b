"""What Codex wants to know of a model before it talks to it: an entry of `models` in GET /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST_OUTPUT = 10_000  # tokens of a tool's output that it keeps


def codex_model(name: str, context: int, modalities: Sequence[str]) -> dict[str, Any]:
    """All fields without which Codex reads nothing. From the context it knows when to shorten a conversation."""
    return {
        "slug": name,
        "display_name": name,
        "description": "Served by forerun",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "context_window": context,
        "input_modalities": list(modalities),
        "shell_type": "shell_command",
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "truncation_policy": {"mode": "tokens", "limit": min(LONGEST_OUTPUT, context // 4)},
    }
