"""What all bodies of requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown fields are errors, and so are values of another type, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
