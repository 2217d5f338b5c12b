"""How drafters follow a sequence: they are told every committed token, fed what the target computed, and may fail."""

from __future__ import annotations

import logging

from forerun.draft.protocol import Drafter
from forerun.engine.sequence import Sequence
from forerun.models.layers.rows import Output

log = logging.getLogger("forerun")


def wants_features(sequence: Sequence, drafters: dict[str, Drafter]) -> bool:
    """Does a drafter this sequence may use look inside the target?"""
    return any(drafters[name].wants_features for name in sequence.arms)


def tell(sequence: Sequence, drafter: Drafter) -> None:
    """Open the sequence, or tell what was committed since."""
    told = sequence.told.get(drafter.name)
    if told is None:
        told = sequence.prompt_length
        drafter.open(sequence.id, sequence.tokens[:told])
    if told < len(sequence.tokens):
        drafter.observe(sequence.id, sequence.tokens[told:])
    sequence.told[drafter.name] = len(sequence.tokens)


def announce(sequence: Sequence, drafters: dict[str, Drafter]) -> None:
    """Tell everybody of the prompt. A device that still computes on it hides what they do with it."""
    for name in list(sequence.arms):
        try:
            tell(sequence, drafters[name])
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            switch_off(sequence, drafters[name], error)


def feed(sequence: Sequence, drafters: dict[str, Drafter], output: Output, start: int, count: int) -> None:
    """Hand over the features of `count` committed rows from row `start` of a pass on, to whoever wants them.

    The tokens come first: a drafter may want to work off its queue.
    """
    for name in list(sequence.arms):
        drafter = drafters[name]
        if not drafter.wants_features:
            continue
        assert output.features is not None
        try:
            tell(sequence, drafter)
            drafter.feed(sequence.id, output.features[start : start + count])
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            switch_off(sequence, drafter, error)


def switch_off(sequence: Sequence, drafter: Drafter, error: Exception) -> None:
    """A drafter failed: say so once and go on without it."""
    name, reason = drafter.name, f"{type(error).__name__}: {error}"
    sequence.policy.drop(name)
    if name in sequence.arms:
        sequence.arms.remove(name)
    sequence.told.pop(name, None)
    drafter.close(sequence.id)
    sequence.warnings.append(f"drafter {name} failed and was switched off: {reason}")
    log.warning("drafter %s failed and was switched off for this request: %s", name, reason)
