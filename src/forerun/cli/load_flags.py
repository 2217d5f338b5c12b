"""How a model is loaded, as flags: declared here once for every command that loads one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, get_type_hints

from forerun.cli.flag_groups import with_flags
from forerun.cli.options import (
    AssistantPosition,
    Device,
    DraftModel,
    Dtype,
    Head,
    MaxContext,
    Precision,
    Quantization,
    Quantize,
    require_positive,
)
from forerun.errors import ForerunError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `forerun.load` is told beside the model's name."""

    draft_model: DraftModel = None
    head: Head = None
    assistant_position: AssistantPosition = "n-1"
    device: Device = "auto"
    dtype: Dtype = Precision.auto
    quantize: Quantize = Quantization.auto
    max_context: MaxContext = None

    def check(self, one_drafter: bool = True) -> None:
        """Refuse what cannot be meant, before a model is loaded for it. A benchmark may compare two drafters."""
        if one_drafter and self.head is not None and self.draft_model is not None:
            raise ForerunError("--head and --draft-model name two drafters: drop one of them")
        if self.head == "":
            raise ForerunError("--head is empty: give the folder of an MTP head")
        require_positive("--max-context", self.max_context)

    def arguments(self) -> dict[str, Any]:
        """For `forerun.load`."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
        return plain | {"head": "auto" if self.head is None else self.head}

    def changed(self) -> dict[str, bool]:
        """Which of them are not at their default: a server, for one, has loaded its model already."""
        return {entry.name: getattr(self, entry.name) != entry.default for entry in fields(self)}


def with_load_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags in place of its parameter `loading`."""
    hints = get_type_hints(LoadOptions, include_extras=True)
    flags = [
        inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=hints[entry.name]
        )
        for entry in fields(LoadOptions)
    ]
    return with_flags(command, "loading", flags, lambda values: LoadOptions(**values))
