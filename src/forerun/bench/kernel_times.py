"""Where the device's time goes: every kernel of a captured launch, by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LONGEST_NAME = 60  # letters: those of other libraries go on for hundreds
ATTENTION = "_attend"  # once in each layer that has it


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel as it ran, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Kind:
    """Kernels of a name at the same place behind attention: the products of a layer share a name, but not a place."""

    name: str
    place: str
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
    end = spans[0].start if spans else 0.0
    for span, place in zip(spans, places(spans), strict=True):
        kind = kinds.setdefault((span.name, place), Kind(span.name, place))
        kind.count += 1
        kind.busy += span.end - span.start
        kind.added += max(0.0, span.end - end)
        end = max(end, span.end)
    return sorted(kinds.values(), key=lambda kind: -kind.added)


def places(spans: Sequence[Span]) -> list[str]:
    """How many kernels each comes after attention; what is behind the last attention has the output matrix in it."""
    marks = [index for index, span in enumerate(spans) if span.name.startswith(ATTENTION)]
    found, since = [], 0
    for index in range(len(spans)):
        since = 0 if index in marks else since + 1
        where = "first" if not marks or index < marks[0] else "last" if index > marks[-1] else ""
        found.append(f"{where} +{since}".strip())
    return found


def print_kinds(title: str, spans: Sequence[Span], most: int = 32) -> None:
    """A table: how often, how long, and how much of the whole."""
    kinds = kinds_of(spans)
    whole = sum(kind.added for kind in kinds)
    print(f"{title}: {len(spans)} kernels, {whole:.0f} us from the first start to the last end", flush=True)
    print(f"  {'count':>5} {'busy us':>9} {'added us':>9} {'share':>6}  {'place':>10}  kernel")
    for kind in kinds[:most]:
        share = kind.added / whole if whole else 0.0
        figures = f"{kind.count:5} {kind.busy:9.1f} {kind.added:9.1f} {share:6.1%}"
        print(f"  {figures}  {kind.place:>10}  {kind.name[:LONGEST_NAME]}", flush=True)
