"""One picture of an engine, or of several added up, for whoever watches: plain data that may come from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.serve.engine_client import EngineState
from forerun.serve.histogram import HISTOGRAMS, Histogram, Snapshot
from forerun.serve.tally import AnswerTotals


@dataclass(frozen=True, slots=True)
class Readings:
    """How it is, and what it did since it started."""

    state: EngineState
    totals: AnswerTotals = field(default_factory=AnswerTotals)
    histograms: Mapping[str, Snapshot] = field(default_factory=lambda: nothing_yet())
    reasons: Mapping[str, int] = field(default_factory=dict)  # requests by how they ended
    preemptions: int = 0
    page: int = 0  # tokens; 0: no cache yet
    pages: int = 0


def nothing_yet() -> dict[str, Snapshot]:
    """Of an engine that has not done anything."""
    return {name: Histogram(bounds).snapshot() for name, (_, bounds) in HISTOGRAMS.items()}


def together(readings: Sequence[Readings]) -> Readings:
    """Of several engines as if they were one."""
    assert readings, "nothing to add up"
    totals, reasons = AnswerTotals(), Counter[str]()
    for one in readings:
        totals.merge(one.totals)
        reasons.update(one.reasons)
    return Readings(
        state=_state([one.state for one in readings], [one.pages for one in readings]),
        totals=totals,
        histograms={name: _sum([one.histograms[name] for one in readings]) for name in HISTOGRAMS},
        reasons=dict(reasons),
        preemptions=sum(one.preemptions for one in readings),
        page=readings[0].page,
        pages=sum(one.pages for one in readings),
    )


def _state(states: Sequence[EngineState], pages: Sequence[int]) -> EngineState:
    """Those that serve make it ready. Shares count by how much there is of what they are shares of."""
    ready = [state for state in states if state.status == "ready"]
    arms: Counter[str] = Counter()
    for state in states:
        arms.update(state.arms)
    return EngineState(
        status="ready" if ready else states[0].status,
        running=sum(state.running for state in states),
        waiting=sum(state.waiting for state in states),
        cache_usage=_mean([state.cache_usage for state in states], pages) or 0.0,
        tokens_per_second=sum(state.tokens_per_second for state in states),
        accepted_share=_lately(states, [state.accepted_share for state in states]),
        tokens_per_round=_lately(states, [state.tokens_per_round for state in states]),
        arms=dict(arms),
        warnings=tuple(dict.fromkeys(warning for state in states for warning in state.warnings)),
    )


def _lately(states: Sequence[EngineState], values: Sequence[float | None]) -> float | None:
    return _mean(values, [state.tokens_per_second for state in states])


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _sum(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Buckets have the same bounds everywhere."""
    bounds = [bound for bound, _ in snapshots[0][0]]
    counts = [sum(column) for column in zip(*([count for _, count in one] for one, _ in snapshots), strict=True)]
    return list(zip(bounds, counts, strict=True)), sum(total for _, total in snapshots)
