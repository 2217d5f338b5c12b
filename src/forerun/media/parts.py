"""Media as they come in: files that nobody has looked into yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from forerun.errors import ForerunError

if TYPE_CHECKING:  # the command line knows of parts without torch
    from forerun.models.layers.media import PromptMedia

Kind = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One picture, film or recording."""

    kind: Kind
    data: bytes  # the file as it is
    name: str  # what errors call it: the name of a file, or the place in a request


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt whose placeholders were expanded: as many tokens as its media have rows."""

    ids: list[int]
    media: PromptMedia


class PromptTooLong(ForerunError):
    """Media make a prompt longer than the context."""

    def __init__(self, tokens: int, context: int) -> None:
        """`tokens`: at least so many."""
        super().__init__(
            f"the prompt has at least {tokens} tokens with its media and the context holds {context}: bring fewer or "
            "smaller ones, or shorten the text"
        )
        self.tokens, self.context = tokens, context

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptTooLong, (self.tokens, self.context)


class MediaOutOfMemory(ForerunError):
    """Nothing is wrong with the media, but there is no room for them now."""

    def __init__(self) -> None:
        super().__init__("there is not enough free memory for the media: bring fewer or smaller ones, or try later")

    def __reduce__(self) -> tuple[Any, ...]:
        return MediaOutOfMemory, ()


class MediaReader(Protocol):
    """What a model that sees or hears does with media. Safe in any thread."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """What the model can read."""
        ...

    @property
    def placeholders(self) -> Mapping[int, Kind]:
        """Tokens that stand for media in a prompt; without media they mean nothing."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all its towers, whether they have been read yet or not."""
        ...

    def read(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        """`ids`: a prompt with one placeholder for each part, in order, as the chat template wrote it.

        Whatever is wrong with a part is a ForerunError that names it; a prompt that is too long is `PromptTooLong`,
        and where there is no memory for a tower it is `MediaOutOfMemory`.
        """
        ...

    def count(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int:
        """Tokens of the prompt that `read` would give, however many. No tower runs; what is wrong is said as there."""
        ...
