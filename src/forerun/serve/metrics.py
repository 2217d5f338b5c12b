"""Numbers for Prometheus: vLLM's names after a prefix of our own, so that dashboards move by search and replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.serve.histogram import HISTOGRAMS, Histogram
from forerun.serve.local_engine import LocalEngine
from forerun.serve.tally import Totals

PREFIX = "forerun:"
LABELS = ("model_name",)

COUNTERS: dict[str, tuple[str, Callable[[Totals], float]]] = {
    "prompt_tokens": ("Prompt tokens read.", lambda t: t.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda t: t.generated),
    "spec_decode_num_drafts": ("Rounds that had drafts.", lambda t: t.drafts),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda t: t.drafted),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.", lambda t: t.accepted),
    "draft_seconds": ("Seconds that answers waited for drafts.", lambda t: t.draft_seconds),
    "verify_seconds": ("Seconds that answers waited for target passes.", lambda t: t.verify_seconds),
}


class Metrics(Collector):
    """Everything is read when somebody asks: nothing of it costs a round anything."""

    def __init__(self, engine: LocalEngine, model_name: str) -> None:
        self._engine, self._model = engine, model_name
        self.registry = CollectorRegistry()  # others may add theirs
        self.registry.register(self)

    def render(self) -> bytes:
        """The text that is scraped."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield from self._gauges()
        totals = self._engine.totals()
        for name, (about, read) in COUNTERS.items():
            yield self._counter(name, about, read(totals))
        yield from self._by_label(totals)
        for name, (about, _) in HISTOGRAMS.items():
            yield self._histogram(name, about, self._engine.tally.histograms[name])

    def _gauges(self) -> Iterator[Metric]:
        state, model = self._engine.state(), self._engine.model
        yield self._gauge("num_requests_running", "Answers in the making.", state.running)
        yield self._gauge("num_requests_waiting", "Answers that wait for their turn or for memory.", state.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all.", state.cache_usage)
        yield self._gauge("tokens_per_second", "Tokens generated lately.", state.tokens_per_second)
        if model is not None:
            pool = model.engine.pool
            yield self._counter(
                "num_preemptions", "Answers that gave way to older ones.", model.engine.scheduler.preemptions
            )
            info = GaugeMetricFamily(
                PREFIX + "cache_config_info", "The cache.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
            )
            info.add_metric([self._model, str(pool.page), str(pool.count)], 1)
            yield info

    def _by_label(self, totals: Totals) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Requests by how they ended.", labels=[*LABELS, "finished_reason"]
        )
        for reason, count in self._engine.tally.reasons.copy().items():
            ended.add_metric([self._model, reason], count)
        yield ended
        positions = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the draft.",
            labels=[*LABELS, "position"],
        )
        for position, count in sorted(totals.accepted_at.items()):
            positions.add_metric([self._model, str(position)], count)
        yield positions
        arms = CounterMetricFamily(PREFIX + "rounds", "Rounds of answers by who drafted.", labels=[*LABELS, "arm"])
        for arm, count in sorted(totals.arms.items()):
            arms.add_metric([self._model, arm], count)
        yield arms

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, about, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, about, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        buckets, total = histogram.snapshot()
        family = HistogramMetricFamily(PREFIX + name, about, labels=LABELS)
        family.add_metric([self._model], buckets, total)
        return family
