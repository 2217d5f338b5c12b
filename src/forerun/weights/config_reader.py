"""Typed access to config.json: every value is checked for its kind and its bounds, and every error names its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError

LARGEST = 1 << 24  # no dimension of a model comes near
SMALLEST = 1e-30  # what is no smaller and no larger than 1 / SMALLEST can be divided and multiplied in float32
SHOWN = 40  # characters of a wrong value in a message


class ConfigReader:
    """One object of a JSON file. Keys that are absent or null have the default; without a default they must be there.

    >>> ConfigReader({"hidden_size": 64}, "config.json").integer("hidden_size")
    64
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        """`where` names the file in messages; `prefix` the object inside it, with a dot behind it."""
        self.values, self.where, self._prefix = values, where, prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number from `low` to `high`."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(
        self, name: str, default: float | None = None, *, above: float = SMALLEST, high: float = 1 / SMALLEST
    ) -> float:
        """A finite number greater than `above` and not greater than `high`."""
        value = self._value(name, default)
        # NaN fails both comparisons.
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= high:
            raise self.wrong(name, f"a number above {above:g} and at most {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty when it is absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(name, "a list of strings")
        return value

    def integers(self, name: str, default: Sequence[int], *, low: int = 0, high: int = LARGEST) -> list[int]:
        """A list of whole numbers."""
        value = self._value(name, list(default))
        if not isinstance(value, list) or not all(type(entry) is int and low <= entry <= high for entry in value):
            raise self.wrong(name, f"a list of whole numbers from {low} to {high}")
        return value

    def part(self, name: str) -> ConfigReader:
        """An object inside this one; empty when it is absent."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return ConfigReader(value, self.where, f"{self._prefix}{name}.")

    def text_model(self, usual: Mapping[str, Any] | None = None) -> ConfigReader:
        """The settings of the language model: beside those of towers, or all there are.

        `usual`: what absent keys mean in its family. transformers has left such keys out when it saved nested settings.
        """
        text = self.part("text_config") if "text_config" in self else self
        absent = {name: value for name, value in (usual or {}).items() if name not in text}
        return ConfigReader({**text.values, **absent}, self.where, text._prefix)

    def only(self, name: str, *known: Any) -> None:
        """Refuses every value but the `known` ones, the first of which is what an absent key means."""
        if self._value(name, known[0]) not in known:
            raise ForerunError(f"{self.name(name)} = {self._shown(name)} is not supported (only {known[0]!r})")

    def name(self, name: str) -> str:
        """File and key, for messages."""
        return f"{self.where}: {self._prefix}{name}"

    def wrong(self, name: str, expected: str) -> ForerunError:
        """The error about a key's value."""
        return ForerunError(f"{self.name(name)} must be {expected}, found {self._shown(name)}")

    def _value(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _shown(self, name: str) -> str:
        value = self.values.get(name)
        # Digits of a huge number are not worth writing out, and above 4300 of them Python refuses to.
        return "a huge number" if isinstance(value, int) and abs(value) > 1 << 64 else repr(value)[:SHOWN]
