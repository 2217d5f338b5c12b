"""Numbers for Prometheus: vLLM's names after a prefix of our own, so that dashboards move by search and replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.serve.histogram import HISTOGRAMS, Snapshot
from forerun.serve.readings import Readings
from forerun.serve.settings import METRICS_NAMES
from forerun.serve.tally import AnswerTotals

LABELS = ("model_name",)

COUNTERS: dict[str, tuple[str, Callable[[AnswerTotals], float]]] = {
    "prompt_tokens": ("Prompt tokens read.", lambda t: t.prompt_tokens),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the cache.", lambda t: t.queried),
    "prefix_cache_hits": ("Prompt tokens that the cache had.", lambda t: t.cached),
    "generation_tokens": ("Tokens generated.", lambda t: t.generated),
    "spec_decode_num_drafts": ("Rounds that had drafts.", lambda t: t.drafts),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda t: t.drafted),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.", lambda t: t.accepted),
    "draft_seconds": ("Seconds that answers waited for drafts.", lambda t: t.draft_seconds),
    "verify_seconds": ("Seconds that answers waited for target passes.", lambda t: t.verify_seconds),
}


class Metrics(Collector):
    """Everything is read when somebody asks: nothing of it costs a round anything."""

    def __init__(self, read: Callable[[], Readings], model_name: str, names: Sequence[str] = ()) -> None:
        """`names`: from `METRICS_NAMES`; every metric comes under each of them. None: our own."""
        self._read, self._model, self._names = read, model_name, tuple(names) or METRICS_NAMES[:1]
        self.registry = CollectorRegistry()  # others may add theirs
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """The text that is scraped."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        readings = self._read()
        for prefix in self._names:
            yield from _Family(f"{prefix}:", self._model).of(readings)


class _Family:
    """All metrics under one prefix."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix, self._model = prefix, model_name

    def of(self, readings: Readings) -> Iterator[Metric]:
        """Gauges, counters and histograms."""
        yield from self._gauges(readings)
        for name, (about, read) in COUNTERS.items():
            yield self._counter(name, about, read(readings.totals))
        yield from self._by_label(readings)
        for name, (about, _) in HISTOGRAMS.items():
            yield self._histogram(name, about, readings.histograms[name])

    def _gauges(self, readings: Readings) -> Iterator[Metric]:
        state = readings.state
        yield self._gauge("num_requests_running", "Answers in the making.", state.running)
        yield self._gauge("num_requests_waiting", "Answers that wait for their turn or for memory.", state.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all.", state.cache_usage)
        yield self._gauge("tokens_per_second", "Tokens generated lately.", state.tokens_per_second)
        if readings.page:
            yield self._counter("num_preemptions", "Answers that gave way to older ones.", readings.preemptions)
            sizes = {"block_size": str(readings.page), "num_gpu_blocks": str(readings.pages)}
            yield self._gauge("cache_config_info", "The cache.", 1, **sizes)

    def _by_label(self, readings: Readings) -> Iterator[Metric]:
        totals, reasons = readings.totals, readings.reasons
        yield self._counters("request_success", "Requests by how they ended.", "finished_reason", reasons)
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the draft.",
            "position",
            dict(sorted(totals.accepted_at.items())),
        )
        yield self._counters("rounds", "Rounds of answers by who drafted.", "arm", dict(sorted(totals.arms.items())))

    def _gauge(self, name: str, about: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, about, labels=[*LABELS, *labels])
        family.add_metric([self._model, *labels.values()], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, about, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, about, labels=[*LABELS, label])
        for key, value in values.items():
            family.add_metric([self._model, str(key)], value)
        return family

    def _histogram(self, name: str, about: str, histogram: Snapshot) -> Metric:
        buckets, total = histogram
        family = HistogramMetricFamily(self._prefix + name, about, labels=LABELS)
        family.add_metric([self._model], buckets, total)
        return family
