"""Where the device's time goes: every kernel of a captured launch, by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LONGEST_NAME = 40  # letters: those of other libraries go on for hundreds


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel as it ran, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Kind:
    """All kernels of a name that run after kernels of another: the products of a layer share a name."""

    name: str
    after: str
    count: int = 0
    busy: float = 0.0  # microseconds from their starts to their ends; a kernel may start before the one before it ends
    added: float = 0.0  # microseconds by which they moved the end: of all kinds together, the time of the launch


def recorded(launch: Callable[[], Any]) -> list[Span]:
    """The kernels of a launch, in the order of their ends."""
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        launch()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(spans, key=lambda span: span.end)


def kinds_of(spans: Sequence[Span]) -> list[Kind]:
    """Kernels by kind, those that take most first."""
    kinds: dict[tuple[str, str], Kind] = {}
    before, end = "", spans[0].start if spans else 0.0
    for span in spans:
        kind = kinds.setdefault((span.name, before), Kind(span.name, before))
        kind.count += 1
        kind.busy += span.end - span.start
        kind.added += max(0.0, span.end - end)
        before, end = span.name, max(end, span.end)
    return sorted(kinds.values(), key=lambda kind: -kind.added)


def print_kinds(title: str, spans: Sequence[Span], most: int = 24) -> None:
    """A table: how often, how long, and how much of the whole."""
    kinds = kinds_of(spans)
    whole = sum(kind.added for kind in kinds)
    print(f"{title}: {len(spans)} kernels, {whole:.0f} us from the first start to the last end", flush=True)
    print(f"  {'count':>5} {'busy us':>9} {'added us':>9} {'share':>6}  kernel, and the one before it")
    for kind in kinds[:most]:
        share = kind.added / whole if whole else 0.0
        names = f"{kind.name[:LONGEST_NAME]} < {kind.after[:LONGEST_NAME] or 'the start'}"
        print(f"  {kind.count:5} {kind.busy:9.1f} {kind.added:9.1f} {share:6.1%}  {names}", flush=True)
