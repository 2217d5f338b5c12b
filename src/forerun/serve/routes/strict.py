"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")

# A list, read up to the first item that is wrong: to write down what is wrong with each of a million takes seconds.
Several = Annotated[list[Item], Field(fail_fast=True)]


class Strict(BaseModel):
    """Unknown fields are errors, and so are values of another type, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
