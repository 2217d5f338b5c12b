"""Prometheus: the names dashboards know, numbers that add up, and all of them finite."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from engines import decoder, request
from local_engines import ask, language_model, serving, work
from prometheus_client.parser import text_string_to_metric_families
from tiny import tiny_model

from forerun.models.layers.decoder import Decoder
from forerun.serve.histogram import Histogram
from forerun.serve.local_engine import LocalEngine
from forerun.serve.metrics import Metrics


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


def scrape(metrics: Metrics) -> dict[str, float]:
    """Sample with its labels, without the model's name → value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if family.name.startswith("process_"):  # of this process, whatever it serves
                found[sample.name] = sample.value
                continue
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == 'tiny "model"\n' and math.isfinite(sample.value)
            key = ",".join([sample.name, *labels.values()])
            assert key not in found
            found[key] = sample.value
    return found


def test_numbers_add_up(target: Decoder) -> None:
    wishes = [request([5 + n, 6, 7] * (1 + n), max_tokens=20 + n, draft="lookup") for n in range(6)]

    async def main() -> None:
        async with serving(language_model(target), max_running=2) as local:
            metrics = Metrics(local.readings, 'tiny "model"\n')
            scrape(metrics)
            asked = [asyncio.create_task(ask(local, wish)) for wish in wishes]
            during: list[dict[str, float]] = []
            while not all(task.done() for task in asked):
                await asyncio.sleep(0.002)
                during.append(scrape(metrics))
            responses = [(await task)[1].response for task in asked]
            (given_up,) = await local.start([work(wishes[0])])
            await given_up.close()
            await ask(local, wishes[0])
            found = scrape(metrics)
        for name in found:
            if name.partition(",")[0].endswith(("_total", "_count", "_bucket")):
                values = [numbers.get(name, 0) for numbers in during]
                assert values == sorted(values), f"{name} fell"
        assert max(numbers["forerun:num_requests_waiting"] for numbers in during) > 0
        assert 1 <= max(numbers["forerun:num_requests_running"] for numbers in during) <= 2
        assert max(numbers["forerun:kv_cache_usage_perc"] for numbers in during) > 0
        last, again = during[-1], responses[0]
        assert last["forerun:generation_tokens_total"] == sum(r.completion_tokens for r in responses)
        assert last["forerun:prompt_tokens_total"] == sum(r.prompt_tokens for r in responses)
        assert last["forerun:spec_decode_num_draft_tokens_total"] == sum(r.drafted for r in responses)
        accepted = sum(r.accepted for r in responses)
        assert last["forerun:spec_decode_num_accepted_tokens_total"] == accepted > 0
        assert sum(v for k, v in last.items() if "accepted_tokens_per_pos_total" in k) == accepted
        drafts = sum(use.rounds for r in responses for arm, use in r.arms.items() if arm != "plain")
        assert last["forerun:spec_decode_num_drafts_total"] == drafts
        assert last["forerun:verify_seconds_total"] == pytest.approx(sum(r.seconds["verify"] for r in responses))
        assert last["forerun:draft_seconds_total"] == pytest.approx(sum(r.seconds["draft"] for r in responses))
        assert last["forerun:time_to_first_token_seconds_count"] == len(wishes)
        assert last["forerun:request_generation_tokens_sum"] == last["forerun:generation_tokens_total"]
        assert last["forerun:inter_token_latency_seconds_count"] == sum(r.completion_tokens - 1 for r in responses)
        tokens = last["forerun:generation_tokens_total"] + last["forerun:prompt_tokens_total"]
        assert last["forerun:iteration_tokens_total_sum"] == tokens
        assert found["forerun:request_success_total,length"] == len(wishes) + 1
        assert found["forerun:request_success_total,abort"] == 1
        assert found["forerun:generation_tokens_total"] >= last["forerun:generation_tokens_total"] + len(again.tokens)
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert found[f"forerun:{name}_seconds_count"] >= len(wishes)
        assert found["forerun:num_preemptions_total"] == 0
        assert found["forerun:cache_config_info,8,400"] == 1

    asyncio.run(main())


def test_before_there_is_a_model() -> None:
    found = scrape(Metrics(LocalEngine().readings, 'tiny "model"\n'))
    assert found["forerun:num_requests_running"] == found["forerun:generation_tokens_total"] == 0


def test_two_registries_do_not_know_of_each_other() -> None:
    engines: list[Any] = [LocalEngine(), LocalEngine()]
    first, second = (Metrics(engine.readings, 'tiny "model"\n') for engine in engines)
    engines[0].tally.reasons["stop"] += 3
    assert scrape(first)["forerun:request_success_total,stop"] == 3
    assert scrape(second)["forerun:request_success_total,stop"] == 0


def test_buckets() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 7):
        histogram.add(value)
    histogram.add(2, times=2)
    assert histogram.snapshot() == ([("1.0", 2.0), ("2.0", 5.0), ("+Inf", 6.0)], 14.0)
