"""Which replica answers: longest prefix, then queue; no replica drowns; the simulation over the same code."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from forerun.bench.suites import fleet as bench
from forerun.errors import ForerunError
from forerun.fleet.routing import BLOCK, BLOCKS, SLACK, ByPrefix, InTurn, Prefixes, Route, chain_of, rendezvous
from forerun.fleet.settings import FleetSettings, plan_of

NAMES = [f"replica-{number}" for number in range(8)]


def idle() -> dict[str, int | None]:
    return dict.fromkeys(NAMES, 0)


def test_a_chain_names_whole_blocks_and_all_before_them() -> None:
    tokens = [random.Random(0).randrange(1000) for _ in range(5 * BLOCK + 7)]
    chain = chain_of(tokens)
    assert len(chain) == 5 and chain == chain_of(tokens[: 5 * BLOCK]) and chain[:3] == chain_of(tokens[: 3 * BLOCK])
    other = chain_of([tokens[0] + 1, *tokens[1:]])
    assert not set(other) & set(chain), "one token at the beginning changes all of them"
    assert chain_of(tokens[: BLOCK - 1]) == ()
    assert len(chain_of([1] * BLOCK * (BLOCKS + 5))) == BLOCKS


def test_the_longest_prefix_wins_and_events_are_heard() -> None:
    chooser: ByPrefix[str] = ByPrefix(seed=0)
    chain = chain_of(list(range(4 * BLOCK)))
    chooser.prefixes.stored(NAMES[3], chain[:2])
    chooser.prefixes.stored(NAMES[5], chain[:3])
    assert chooser.choose(Route(chain), idle()) == NAMES[5]
    chooser.prefixes.removed(NAMES[5], chain[1:])
    assert chooser.choose(Route(chain), idle()) == NAMES[3]
    chooser.prefixes.keep([name for name in NAMES if name != NAMES[3]])
    assert chooser.choose(Route(chain), idle()) == NAMES[5]
    gone = {name: 0 for name in NAMES if name != NAMES[5]}
    assert chooser.choose(Route(chain), gone) in gone, "whoever is gone is not chosen, whatever it had"


def test_what_was_sent_there_is_there() -> None:
    chooser: ByPrefix[str] = ByPrefix(seed=0)
    chain = chain_of(list(range(4 * BLOCK)))
    first = chooser.choose(Route(chain[:2]), idle())
    chooser.sent(Route(chain[:2]), first)
    for _ in range(20):
        assert chooser.choose(Route(chain), idle()) == first


def test_a_hot_prefix_drowns_nobody() -> None:
    """Queues stay near each other when everybody asks for the same, and nothing ends meanwhile."""
    chooser: ByPrefix[str] = ByPrefix(seed=0)
    route, queues = Route(chain_of(list(range(3 * BLOCK)))), idle()
    for _ in range(400):
        name = chooser.choose(route, queues)
        chooser.sent(route, name)
        queues[name] = (queues[name] or 0) + 1
    loads = [load or 0 for load in queues.values()]
    assert max(loads) - min(loads) <= 2 * SLACK + 2 and min(loads) > 30


def test_sessions_stay_and_spread() -> None:
    chooser: ByPrefix[str] = ByPrefix()
    homes = {name: {chooser.choose(Route(session=name), idle()) for _ in range(5)} for name in map(str, range(200))}
    assert all(len(found) == 1 for found in homes.values())
    counts = Counter(found.pop() for found in homes.values())
    assert len(counts) == len(NAMES) and max(counts.values()) < 3 * min(counts.values())


def test_a_replica_that_goes_moves_its_own_share_only() -> None:
    for home in map(str, range(100)):
        before, after = rendezvous(home, NAMES), rendezvous(home, NAMES[1:])
        assert before == after or before == NAMES[0]


def test_replicas_take_turns() -> None:
    chooser: InTurn[str] = InTurn()
    assert Counter(chooser.choose(Route(), idle()) for _ in range(80)) == dict.fromkeys(NAMES, 10)


def test_few_prefixes_are_remembered() -> None:
    prefixes: Prefixes[str] = Prefixes(most=100)
    prefixes.stored("a", range(1000))
    assert prefixes.longest([899], ["a"]) == set() and prefixes.longest([900], ["a"]) == {"a"}


def test_prefixes_are_hit_and_nobody_waits_longer_for_it() -> None:
    """The bench, small: ten replicas, and the routing code itself."""
    results = bench.measure(Namespace(replicas="1,10", trace=None, seed=1))["results"]
    found = {(row["replicas"], row["policy"]): row for row in results}
    alone, prefix, queue, turns = (found[1, "prefix"], *(found[10, p] for p in ("prefix", "queue", "round-robin")))
    assert prefix["hit_rate"] > 0.9 * alone["hit_rate"] - 0.02
    assert prefix["hit_rate"] > queue["hit_rate"] + 0.15 and prefix["hit_rate"] > turns["hit_rate"] + 0.15
    assert prefix["waiting_p95"] <= min(queue["waiting_p95"], turns["waiting_p95"])


def test_traces_of_others_are_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n * 50, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2 + n]} for n in range(40)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    row = bench.measure(Namespace(replicas="2", trace=trace, seed=0))["results"][0]
    assert row["requests"] == 40 and 0.4 < row["hit_rate"] < 0.5
    trace.write_text('{"timestamp": 1}')
    with pytest.raises(ForerunError, match="Mooncake"):
        bench.recorded(trace)


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({"replcas": 2}, "did you mean replicas"),
        ({"replicas": "2"}, "replicas: "),
        ({"replicas": 0}, "--replicas 0"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2"),
        ({"cpus": -1}, "--cpus -1"),
        ({"gpus": -0.5}, "--gpus -0.5"),
        ({"routing": "best"}, "routing: "),
        ({"log_format": "xml"}, "log_format: "),
        ({"host": "0.0.0.0"}, "set a key"),
        ({"kv_events": "tcp://127.0.0.1:5557"}, "--kv-events is for forerun serve"),
        ({"metrics_names": ["prometheus"]}, "--metrics-names prometheus"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_plans_that_cannot_be_are_one_line(values: dict[str, object], about: str) -> None:
    with pytest.raises(ForerunError, match=about) as error:
        plan_of(values)
    assert "\n" not in str(error.value)


def test_a_plan_is_read() -> None:
    plan = plan_of({"model": "m", "replicas": 2, "cpus": 2, "max-running": 8, "dtype": "float32", "api_key": "k"})
    assert (plan.log_level, plan.log_format) == ("info", "text")
    assert plan_of({"log-format": "json", "log_level": "debug"}).log_format == "json"
    assert plan.fleet == FleetSettings(replicas=2, cpus=2.0) and plan.serving.max_running == 8
    assert plan.loading == {"dtype": "float32"} and plan.model == "m"
