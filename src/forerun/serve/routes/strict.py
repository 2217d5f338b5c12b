"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Item = TypeVar("Item")

# A list, read up to the first item that is wrong: to write down what is wrong with each of a million takes seconds.
Several = Annotated[list[Item], Field(fail_fast=True)]


class Strict(BaseModel):
    """Unknown fields are errors, and so are values of another type, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SentBack(Strict):
    """What clients got from servers and send back as they keep it: a field with nothing in it says nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        return {name: value for name, value in sent.items() if name in cls.model_fields or value not in (None, [])}
