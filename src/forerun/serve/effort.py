"""Reasoning effort as clients name it, for models that know only thinking or not thinking and for how long."""

from __future__ import annotations

from typing import Any, Literal

from forerun.serve.chat_job import ThinkingWish
from forerun.serve.errors import bad_request

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Tokens; None: until the model has thought enough.
BUDGETS: dict[Effort, int | None] = {
    "minimal": 256,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


def thinking_for(effort: Effort | None) -> ThinkingWish:
    """None: as the model's template does it."""
    if effort is None:
        return ThinkingWish()
    return ThinkingWish(enabled=False) if effort == "none" else ThinkingWish(enabled=True, budget=BUDGETS[effort])


def switched(thinking: ThinkingWish, options: dict[str, Any]) -> ThinkingWish:
    """With what `enable_thinking` says: it has its own place in a job, and is taken out of the template's options."""
    enabled = options.pop("enable_thinking", thinking.enabled)
    if not isinstance(enabled, bool | None):
        raise bad_request("'enable_thinking' must be true or false.", "chat_template_kwargs")
    return ThinkingWish(enabled, thinking.budget)
