"""Everything a training run can be told, and its defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FRESH_RATE = 3e-3  # for Muon, which a new head begins with
CONTINUED_RATE = 5e-4  # for AdamW: a trained head loses what it knows at a higher one
HARD, AGREE = 0.2, 6.0  # the first while a head learns its target, the second once most drafts are near
FRESH_AGREE_FROM = 0.6  # of a run that starts from nothing


@dataclass(frozen=True, slots=True)
class Settings:
    """Knobs of one run. What is None is decided from the model, the device or the data."""

    seed: int = 0
    start_from: str | None = None  # a head's folder to go on from; None: start from the target's last layer
    minutes: float | None = None  # wall clock for the whole run; None: as long as `steps` take
    steps: int | None = None  # optimiser steps; None: until the minutes are over
    # data
    prompts: int = 40_000  # how many to answer at most, if time and memory allow
    answer_tokens: int = 320
    prompt_tokens: int = 1600  # longer prompts are left out
    greedy_share: float = 0.5  # of the answers; the others are sampled
    generate_batch: int | None = None
    data_share: float = 0.28  # of the minutes, for prompts, answers and features
    feature_bytes: int | None = None  # memory for cached features; None: a share of what is free
    # head
    taps: tuple[int, ...] | None = None
    intermediate: int | None = None  # width of the feed-forward layer; None: the target's
    # loss
    unroll: int = 5
    decay: float = 0.8
    frequent: int = 16_384  # ids that are always in the loss
    others: int = 4_096  # ids drawn from the rest at every step
    hard: float | None = None  # share of the teacher that is its likeliest token alone, as greedy drafting asks for
    agree: float = AGREE  # weight of choosing the target's token under the same noise, beside the cross-entropy ...
    agree_at: tuple[float, ...] = (0.3, 0.8)  # ... at these temperatures (a low one is nearly greedy) ...
    agree_from: float | None = None  # ... from this share of the run on; None: at once for a trained head
    missed: float = 0.3  # chance of a later draft to count when one before it is wrong: it would never be looked at
    # optimiser
    rate: float | None = None  # the highest; None: lower for a head that is trained already
    warmup: float = 0.02
    final_rate: float = 0.02  # of the highest
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 12.0  # the weights' average looks back over about 1/(average + 1) of all steps; 0: over all
    batch_tokens: int | None = None
    # evaluation and output
    evaluation_tokens: int = 128
    evaluation_share: float = 0.1
    draft_vocab: int | None = None  # None: chosen by what it costs
    checkpoint_seconds: float = 60.0

    @property
    def continues(self) -> bool:
        """Does a trained head go on, instead of a new one that begins?"""
        return self.start_from is not None

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        if self.rate is not None:
            return self.rate
        return CONTINUED_RATE if self.continues else FRESH_RATE

    @property
    def agrees_from(self) -> float:
        """From which share of the run on equal choices count."""
        if self.agree_from is not None:
            return self.agree_from
        return 0.0 if self.continues else FRESH_AGREE_FROM

    def aim(self, fraction: float) -> tuple[float, float]:
        """`hard` and `agree` when this share of the run is over.

        Equal choices are what counts in the end, but a step for them takes half as long again and moves only rows that
        are nearly right: a new head first learns by cross-entropy alone.
        """
        late = self.agree > 0 and fraction >= self.agrees_from
        return (0.0 if late else HARD) if self.hard is None else self.hard, self.agree if late else 0.0

    def recipe(self) -> dict[str, Any]:
        """What must not change between a run and its continuation."""
        changeable = {"minutes", "steps", "checkpoint_seconds", "generate_batch", "feature_bytes"}
        return {name: value for name, value in asdict(self).items() if name not in changeable}


def default_taps(layers: int) -> tuple[int, ...]:
    """Inputs of a low, a middle and a high layer: what the last hidden state no longer tells."""
    chosen = {max(1, round(0.1 * layers)), layers // 2, int(0.85 * layers)}
    return tuple(sorted(tap for tap in chosen if 0 < tap < layers))
