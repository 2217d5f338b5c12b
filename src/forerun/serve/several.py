"""Lists in the bodies of requests."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

Item = TypeVar("Item")

# Ends at the first item that is wrong: to write down what is wrong with each of a million takes many seconds.
Several = Annotated[list[Item], Field(fail_fast=True)]
