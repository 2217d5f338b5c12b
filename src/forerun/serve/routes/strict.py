"""What all bodies of requests have in common."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator
from typing_extensions import TypeAliasType

Item = TypeVar("Item")

# A list, read up to the first item that is wrong: to write down what is wrong with each of a million takes seconds.
Several = Annotated[list[Item], Field(fail_fast=True)]


# pydantic's own JsonValue takes infinity where a validator stands around the model that uses it.
Json = TypeAliasType("Json", "list[Json] | dict[str, Json] | str | bool | int | FiniteFloat | None")


class Strict(BaseModel):
    """Unknown fields are errors unless they are null, and so are values of another type, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    nothing: ClassVar[tuple[Any, ...]] = (None,)  # a field that is not known and has one of these in it is absent

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        known, filled = known_names(cls), _filled(cls)
        return {
            name: value
            for name, value in sent.items()
            if not (value in cls.nothing if name not in known else value is None and name in filled)
        }


@cache
def known_names(body: type[BaseModel]) -> frozenset[str]:
    """Of its fields, as they are sent."""
    return frozenset(entry.alias or name for name, entry in body.model_fields.items())


@cache
def _filled(body: type[BaseModel]) -> frozenset[str]:
    """Fields that have something in them where they are not sent."""
    return frozenset(
        entry.alias or name
        for name, entry in body.model_fields.items()
        if not entry.is_required() and entry.default is not None
    )


class SentBack(Strict):
    """What clients got from servers and send back as they keep it: an empty list says nothing, either."""

    nothing: ClassVar[tuple[Any, ...]] = (None, [])
