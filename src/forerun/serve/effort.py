"""Reasoning effort as clients name it, for models that know only thinking or not thinking and for how long."""

from __future__ import annotations

from typing import Literal

from forerun.serve.chat_job import Thinking

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# Tokens; None: until the model has thought enough.
BUDGETS: dict[Effort, int | None] = {"minimal": 256, "low": 1024, "medium": 8192, "high": None, "xhigh": None}


def thinking_for(effort: Effort | None) -> Thinking:
    """None: as the model's template does it."""
    if effort is None:
        return Thinking()
    return Thinking(enabled=False) if effort == "none" else Thinking(enabled=True, budget=BUDGETS[effort])
