"""How often a measurement lay between which bounds: one thread writes, any may read."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

# As other servers have them, so that dashboards fit; the first ones are finer, because small models are fast.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
PER_ROUND = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# vLLM's names, what they mean, and their bounds.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Seconds from the request to its first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Seconds between tokens; tokens of one round share theirs.", PER_TOKEN),
    "request_time_per_output_token_seconds": ("Seconds per token after the first, of whole requests.", PER_TOKEN),
    "e2e_request_latency_seconds": ("Seconds from the request to its end.", REQUEST),
    "request_queue_time_seconds": ("Seconds before a prompt was begun.", REQUEST),
    "request_inference_time_seconds": ("Seconds from the beginning of the prompt to the end.", REQUEST),
    "request_prefill_time_seconds": ("Seconds from the beginning of the prompt to the first token.", REQUEST),
    "request_decode_time_seconds": ("Seconds from the first token to the last.", REQUEST),
    "request_prompt_tokens": ("Prompt tokens of requests.", TOKENS),
    "request_generation_tokens": ("Generated tokens of requests.", TOKENS),
    "iteration_tokens_total": ("Tokens of one round of the engine, those of prompts included.", PER_ROUND),
}

Snapshot = tuple[list[tuple[str, float]], float]  # upper bounds and how many lay at or below each; the sum of all


class Histogram:
    """Buckets with fixed upper bounds, and one for all above them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """A measurement, or several that were equal."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Snapshot:
        """As Prometheus wants it."""
        counts, total = self._counts.copy(), self._sum
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(counts)), strict=True)), total
