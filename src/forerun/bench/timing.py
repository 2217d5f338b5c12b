"""How long something takes: wall time, or the device's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

REPEATS = 30


def wall_seconds(work: Callable[[], Any]) -> float:
    """Of one call; what a GPU was asked to do is done when the clock stops."""
    waits = torch.cuda.is_available()
    if waits:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if waits:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def device_seconds(launch: Callable[[], Any]) -> float:
    """Median seconds of something launched again and again without waiting. Where there is no GPU, of one launch."""
    if not torch.cuda.is_available():
        return wall_seconds(launch)
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))) / 1e3


def captured(launch: Callable[[], Any]) -> Callable[[], Any]:
    """As a CUDA graph. Where there is no GPU, as it is."""
    if not torch.cuda.is_available():
        return launch
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay
