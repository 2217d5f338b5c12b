"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.gguf_header import Value


class Metadata:
    """Typed access to `<architecture>.<key>`, with errors that name the key."""

    def __init__(self, values: dict[str, Value], where: str) -> None:
        self.values = values
        self.where = where
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, key: str) -> Value | None:
        return self.values.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.senseless(key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.senseless(key)
        return decimal(value)

    def senseless(self, key: str) -> ForerunError:
        """The error about a key's value."""
        found = repr(self.get(key))[:40]
        return ForerunError(f"{self.where}: metadata {self.architecture}.{key} is missing or senseless ({found})")

    def counts(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Of every layer: one number for all, or a list."""
        value = self.get(key)
        if not isinstance(value, tuple):
            return [self.count(key, default)] * layers
        if len(value) != layers or not all(isinstance(one, int) and 0 < one < 2**31 for one in value):
            raise ForerunError(f"{self.where}: metadata {self.architecture}.{key} must have {layers} counts")
        return [int(one) for one in value]

    def linear_scaling(self) -> dict[str, Any]:
        """A rotation that is stretched evenly, in the words of `rope_parameters`; nothing where it is not.

        llama.cpp takes a factor for that where no type is named.
        """
        kind, key = self.get("rope.scaling.type"), "rope.scaling.factor"
        if kind not in (None, "none", "linear"):
            raise ForerunError(f"{self.where}: rope scaling {str(kind)[:40]!r} is not read")
        if kind == "none" or (kind is None and self.get(key) is None):
            return {}
        return {"rope_type": "linear", "factor": self.number(key)}

    def special_tokens(self) -> dict[str, int | None]:
        """Ids of the tokens that begin, end and fill up a text, as config.json has them."""
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
        return {name: self.token(own) for name, own in names.items()}

    def token(self, key: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def decimal(value: float) -> float:
    """The shortest decimal of a 32-bit float: 9.999999747378752e-06 was written as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
