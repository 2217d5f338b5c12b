"""Who sits in which batch slot: sequences join and leave one by one, the others keep their slots and their drafts."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.draft.protocol import DeviceHalf
from forerun.engine.batch_slots import BatchSlots
from forerun.engine.drafters import Drafters
from forerun.engine.graphs import batch_size_for
from forerun.engine.sequence import Sequence


class SlotAssignment:
    """Keeps batch slots, and the device half of a drafter, in step with the sequences of the next round."""

    def __init__(self, slots: BatchSlots, half: DeviceHalf | None, drafters: Drafters) -> None:
        self.slots, self.half, self.drafters = slots, half, drafters

    def changes(self, sequences: list[Sequence]) -> bool:
        """Would `assign` let anybody join or leave?"""
        occupants = self.slots.occupants.values()
        return {id(one.sequence) for one in occupants if not one.stale} != {id(sequence) for sequence in sequences}

    def assign(self, sequences: list[Sequence]) -> list[int]:
        """The slot of each of them; everybody else leaves."""
        occupants, staying = self.slots.occupants, {id(sequence) for sequence in sequences}
        leaving = [slot for slot, one in occupants.items() if id(one.sequence) not in staying]
        joining: dict[int, Sequence] = {}
        for slot, one in occupants.items():
            if slot not in leaving and (one.stale or not self._follow_pages(slot)):
                joining[slot] = one.sequence  # again, as the host knows it
        taken = {id(one.sequence): slot for slot, one in occupants.items() if slot not in leaving}
        small = batch_size_for(max(1, len(sequences)))  # slots of the smallest graphs that hold all of them
        for sequence_id, slot in list(taken.items()):
            if slot >= small:  # it moves to where somebody left
                leaving.append(slot)
                del taken[sequence_id]
                joining.pop(slot, None)
        free = iter(sorted(set(range(self.slots.most)) - set(taken.values())))
        for sequence in sequences:
            if id(sequence) not in taken:
                taken[id(sequence)] = slot = next(free)
                joining[slot] = sequence
        if leaving or joining:
            self._change(joining, leaving)
        return [taken[id(sequence)] for sequence in sequences]

    def _follow_pages(self, slot: int) -> bool:
        """Tell a slot of pages that its sequence got. False when the sequence was moved."""
        one = self.slots.occupants[slot]
        cache = one.sequence.cache
        if cache.slot != one.recurrent or not cache.still_holds(one.blocks):
            return False  # it was parked and came back elsewhere
        if len(cache.pages) > one.pages:
            self.slots.add_pages(slot)
            half = self.half
            if half is not None and half.follows(slot):
                room = len(cache.pages) * self.slots.pool.page
                if not self.drafters.try_for(one.sequence, half.name, lambda: half.grow(slot, room)):
                    self._half_leaves(slot, one.sequence)
        return True

    def _change(self, joining: dict[int, Sequence], leaving: Iterable[int]) -> None:
        gone = [slot for slot in leaving if slot not in joining]
        for slot in {*leaving, *joining} & set(self.slots.occupants):
            self._half_leaves(slot, self.slots.occupants[slot].sequence)
        self.slots.change(joining, gone)
        half = self.half
        for slot, sequence in joining.items():
            if half is not None and half.name in sequence.arms:
                self.drafters.try_for(sequence, half.name, lambda: self._half_joins(half, slot, sequence))  # noqa: B023

    def _half_joins(self, half: DeviceHalf, slot: int, sequence: Sequence) -> None:
        self.drafters.tell(sequence, self.drafters.by_name[half.name])
        half.join(slot, sequence.id, len(sequence.cache.pages) * self.slots.pool.page)

    def _half_leaves(self, slot: int, sequence: Sequence) -> None:
        """The host half goes on from where the sequence stands."""
        half = self.half
        if half is None or not half.follows(slot):
            return
        if half.name not in sequence.told:  # it was closed
            half.leave(slot, None)
            return

        def leave() -> None:
            self.drafters.tell(sequence, self.drafters.by_name[half.name])
            half.leave(slot, sequence.cache.length)

        self.drafters.try_for(sequence, half.name, leave)
        if half.follows(slot):  # it failed
            half.leave(slot, None)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """These leave their slots."""
        found = [slot for sequence in sequences if (slot := self.slots.slot_of(sequence)) is not None]
        if found:
            self._change({}, found)
