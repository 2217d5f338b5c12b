"""What every drafter looks like: it follows sequences, proposes tokens when asked, and is never trusted.

A proposal is checked token by token by the target. A drafter that is wrong, late or broken costs speed, never a
wrong token, so the protocol has no way to report success or failure.
"""

# ruff: noqa: ARG002 - what a drafter does unless it says otherwise is mostly nothing

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from forerun.cache.pages import SequenceCache
    from forerun.kernels.gpu.editing import EditTables
    from forerun.models.layers.media import PromptMedia
    from forerun.sample.row import Row


@dataclass(slots=True)
class Draft:
    """Tokens proposed for one sequence, in order; an empty list means plain decoding this round."""

    tokens: list[int]
    # [k, V], row i is the distribution token i was drawn from (for `rejection`); None for deterministic drafts.
    probabilities: Tensor | None = None


@dataclass(slots=True)
class Want:
    """A request for up to `depth` tokens after everything committed so far in one sequence."""

    sequence_id: int
    depth: int
    # Describes the first drafted token (history, position, noise); later rows follow from it.
    row: Row
    # True when the tokens will be judged by rejection sampling rather than by the coupled rule.
    rejection: bool
    # The target's keys and values of this sequence, for a drafter that reads them.
    cache: SequenceCache | None = None


def draft_for_some(wants: list[Want], able: list[bool], draft: Callable[[list[Want]], list[Draft]]) -> list[Draft]:
    """Drafts for those who can be served, all in one call, and none for the others."""
    served = [want for want, is_able in zip(wants, able, strict=True) if is_able]
    made = iter(draft(served) if served else ())
    return [next(made) if is_able else Draft([]) for is_able in able]


class SlotTensors(Protocol):
    """The batch slots of a device, as far as drafters read and write them: one element or column for each slot."""

    most_pages: int  # that a sequence may hold
    position: Tensor  # [slots] int32: tokens in the target's cache
    pending: Tensor  # [slots] int64: the token after them
    tables: list[Tensor]  # by page group [slots, pages] int32: the target's block tables
    recurrent: Tensor  # [slots] int32: where the recurrent state is
    temperature: Tensor  # [slots] float64
    seed: Tensor  # [slots, 3] int64
    drafts: Tensor  # [depth, slots] int64: for the next round
    drafted: Tensor  # [slots] int32: how many of them are real

    @property
    def edits(self) -> EditTables | None:
        """What requests change in their logits."""
        ...


class Capture(Protocol):
    """Captures a launch as a graph: what comes back replays it."""

    def __call__(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


@dataclass(frozen=True, slots=True)
class FollowShape:
    """A round as the device half of a drafter sees it: what its part of the round is captured for."""

    slots: int  # the first so many
    width: int  # rows of each
    drafts: int  # to make for the next round
    edited: bool = False  # are logits changed by biases or penalties?

    @property
    def only_follows(self) -> bool:
        """A plain round that needs no drafts after it: a half may put off its own work."""
        return self.width == 1 and not self.drafts


class DeviceHalf(Protocol):
    """Follows the sequences in batch slots and drafts for their next round, without the host."""

    name: str

    def join(self, slot: int, sequence_id: int, tokens: int) -> bool:
        """Take a sequence over from the host half, with room for `tokens` tokens; False when there is none."""
        ...

    def grow(self, slot: int, tokens: int) -> bool:
        """More room; False when there is none."""
        return True

    def leave(self, slot: int, length: int | None) -> None:
        """Hand a sequence back with `length` tokens in its cache; None: it is over."""
        ...

    def follows(self, slot: int) -> bool:
        """Does somebody sit there?"""
        ...

    def before_round(self, shape: FollowShape, captured: bool) -> None:
        """A round is about to be launched, or to be captured first."""
        return

    def may_repeat(self, shape: FollowShape) -> bool:
        """Can such a round follow at once, with nothing captured before it?"""
        return True

    def after_pass(
        self, shape: FollowShape, features: Tensor, chosen: Tensor, before: Tensor, accepted: Tensor
    ) -> None:
        """Part of a captured round. features [slots · width, …]; chosen [slots, width]; before, accepted [slots]."""
        ...

    def launched(self, shape: FollowShape) -> None:
        """Such a round was launched."""
        return

    def idle_values(self) -> list[tuple[Tensor, int]]:
        """What it keeps for each slot, and what that is while nobody sits there."""
        ...

    def prepare(self, slots: int) -> None:
        """Capture whatever rounds of so many slots may need beside themselves."""
        return


class Drafter(Protocol):
    """Proposes tokens for many sequences. Keeps its own state for each, between `open` and `close`.

    Unless it says otherwise, it needs no features, drafts nothing for free and has no part in a device's rounds.
    """

    name: str
    wants_features: bool = False  # does it look inside the target? Then `feed` is called.

    def open(self, sequence_id: int, tokens: list[int], media: PromptMedia | None = None) -> None:
        """A sequence begins; `tokens` is its prompt, and `media` what stands in it in place of placeholders."""
        ...

    def open_late(self, sequence_id: int, pending: int) -> None:
        """Follow a sequence from its pending token on: features of positions before that one never come."""
        self.open(sequence_id, [pending])

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        """Tokens were committed: every one after the prompt comes by here once, in order, the pending one included."""
        ...

    def feed(self, sequence_id: int, features: Tensor) -> None:
        """What the target computed at committed positions [rows, features], from the first followed token on, in order.

        By then the tokens up to and including the one after the last of these positions are known, except at the end
        of the prompt. Called only when `wants_features` is set. Keep a copy: the tensor may be reused.
        """
        return

    def propose(self, wants: list[Want]) -> list[Draft]:
        """One draft for each want, in the same order. A draft may be shorter than asked for, or empty."""
        ...

    def ready(self, sequence_id: int) -> int:
        """How much speaks for a draft now; 0: nothing. Cheap; called only for a sequence that was told everything.

        A lookup says how many tokens match, others just whether they can draft.
        """
        ...

    def peek(self, sequence_id: int, depth: int) -> list[int]:
        """What it would draft now, where that costs next to nothing; else nothing. Called after `ready`."""
        return []

    def device_half(self, slots: SlotTensors, capture: Capture) -> DeviceHalf | None:
        """The part of it that runs inside the rounds of a device, if it has one; asked once, when an engine is made."""
        return None

    def close(self, sequence_id: int) -> None:
        """The sequence is over; forget it. Closing one that is not open does nothing."""
        ...
