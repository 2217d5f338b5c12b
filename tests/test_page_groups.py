"""Pages by group: layers of other shapes and windows side by side, pages counted, given back when out of sight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import CHUNK, CONTEXT, CPU, PAGE, VOCAB, NoText, decoder, engine, finish, pool_for, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from forerun.cache.groups import HOLE, PageGroup
from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.interface import WIDEST, AttentionSpec, HeadLayout
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass

WINDOW = 12
PROMPT = [(37 * n + 11) % VOCAB for n in range(60)]
MIXED = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Windows in the first and the last layer, none between."""
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "qwen2", **MIXED), quantize=False)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A window in every layer."""
    return decoder(tiny_model(tmp_path_factory.mktemp("w"), "mistral", sliding_window=WINDOW), quantize=False)


class Hoarder(SequenceCache):
    """Gives nothing back on the way."""

    def _leave_unseen(self) -> None:
        pass


@torch.inference_mode()
def logits_of(model: Decoder, cache: SequenceCache, passes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """A prompt in chunks, then decode passes of so many rows, of which some are kept."""
    found = []
    cache.grow(len(PROMPT) + 80)
    for start in range(0, len(PROMPT), CHUNK):
        tokens = PROMPT[start : start + CHUNK]
        found.append(model.forward(make_pass([(cache, tokens)], last_only=False, prompt=True)).logits.clone())
        cache.commit(len(tokens))
    for number, (rows, keep) in enumerate(passes):
        tokens = [(number + 7 * row) % VOCAB for row in range(rows)]
        found.append(model.forward(make_pass([(cache, tokens)], last_only=False)).logits.clone())
        cache.commit(min(keep, rows))
    return found


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, WIDEST), st.integers(0, 4)), min_size=1, max_size=12))
def test_bits_are_those_of_a_cache_that_keeps_everything(mixed: Decoder, passes: list[tuple[int, int]]) -> None:
    pool = pool_for(mixed, pages=60)
    thrifty, hoarder = SequenceCache(pool), Hoarder(pool)
    expected = logits_of(mixed, hoarder, passes)
    for group in pool.groups:  # what is free is poison: whoever reads it is found out
        for layer in group.layers:
            layer.keys[group._free], layer.values[group._free] = float("nan"), float("nan")
    found = logits_of(mixed, thrifty, passes)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    windows = [group.window for group in pool.groups]
    assert windows == [WINDOW, 0] and [layer.group for layer in pool.layers] == [0, 1, 0]
    holes = [held.count(HOLE) for held in thrifty.blocks]
    assert holes[0] == (thrifty.length + 1 - WINDOW - WIDEST) // PAGE > 0 and holes[1] == 0
    assert pool.groups[0].free - pool.groups[1].free == holes[0] and HOLE not in hoarder.pages
    pool.check([thrifty, hoarder])
    thrifty.release()
    hoarder.release()
    pool.check([])
    assert pool.free == 60


def test_a_whole_round_can_be_rolled_back(mixed: Decoder) -> None:
    """As the draft model does; further back is refused, because what a row would see may be gone."""
    cache = SequenceCache(pool_for(mixed))
    logits_of(mixed, cache, [])
    cache.rewind(len(PROMPT) - WIDEST)
    with pytest.raises(AssertionError, match="given back"):
        cache.rewind(WINDOW)


@pytest.mark.parametrize("draft", ["off", "model", "lookup"])
def test_a_sequence_with_holes_is_parked_and_comes_back(windowed: Decoder, draft: str) -> None:
    """Two sequences in turn, in a pool that holds one of them."""
    whole = [run(engine(windowed), request(PROMPT[n:], max_tokens=60))[0].answer for n in range(2)]
    machine = engine(windowed, pages=17, draft_model=windowed)
    sequences = [
        machine.submit(request(PROMPT[n:], max_tokens=60, draft=draft, draft_tokens=3), NoText()) for n in range(2)
    ]
    finish(machine, sequences[:1])
    with torch.inference_mode():
        cache = sequences[0].cache
        blocks = cache.blocks[0][: -(-cache.length // PAGE)]  # what was only reserved is not copied
        cache.park()
        size = 4 * 2 * 2 * 16 * PAGE * 4  # layers of both, keys and values, heads, size, tokens, bytes
        assert machine.pool.parked_bytes == (len(blocks) - blocks.count(HOLE)) * size > 0
        machine.pool.check([s.cache for s in sequences])
        finish(machine, sequences)
        sequences[0].cache.unpark()
    assert machine.pool.parked_bytes == 0
    machine.pool.check([s.cache for s in sequences])
    assert [s.answer for s in sequences] == whole
    assert all(held.count(HOLE) for s in sequences for held in s.cache.blocks)
    assert not [s.arms for s in sequences if draft != "off" and not s.arms], "no drafter was switched off"


def test_an_answer_longer_than_the_pool(windowed: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows into the pages it gave back."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    whole = run(engine(windowed), request(PROMPT[:20], max_tokens=None))[0]
    machine = engine(windowed, pages=12)
    (sequence,) = run(machine, request(PROMPT[:20], max_tokens=None))
    assert sequence.answer == whole.answer and len(sequence.tokens) == CONTEXT > 2 * 12 * PAGE
    machine.pool.check([sequence.cache])


def test_groups_go_by_shape_and_window_not_by_query_heads() -> None:
    specs = [
        AttentionSpec(HeadLayout(8, 2, 16)),
        AttentionSpec(HeadLayout(4, 2, 16), scale=1.0),
        AttentionSpec(HeadLayout(8, 1, 32)),
        AttentionSpec(HeadLayout(8, 1, 32), window=9),
    ]
    pool = PagePool(specs, 5, PAGE, torch.float32, CPU)
    assert [layer.group for layer in pool.layers] == [0, 0, 1, 2]
    assert [tuple(layer.keys.shape) for layer in pool.layers] == [(5, 2, 16, PAGE)] * 2 + [(5, 1, 32, PAGE)] * 2


class Shape:
    delta, recurrent_layers = None, 0
    attention = (AttentionSpec(HeadLayout(8, 2, 16)), AttentionSpec(HeadLayout(8, 1, 64), window=CONTEXT))


def test_memory_is_planned_for_all_groups() -> None:
    each = 4 * PAGE * (2 * 2 * 16 + 2 * 64)  # bytes of a page in both
    pool = PagePool.within(Shape(), 10_000, PAGE, 7 * each + 5, torch.float32, CPU)
    assert pool is not None and pool.count == 7
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in pool.layers) == 7 * each


class Holders:
    """A model of counting: which page is held how often."""

    def __init__(self) -> None:
        self.group = PageGroup(0, AttentionSpec(HeadLayout(1, 1, 2)), 1, 6, PAGE, torch.float32, CPU, spare=False)
        self.held: list[int] = []

    def act(self, action: Any) -> None:
        kind, number = action
        if kind == "take" and number <= self.group.free:
            self.held += self.group.take(number)
        elif kind == "share" and self.held:
            page = self.held[number % len(self.held)]
            self.group.share([page])
            self.held.append(page)
        elif kind == "give" and self.held:
            self.group.give_back([self.held.pop(number % len(self.held)), HOLE])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give", "give"]), st.integers(0, 5)), max_size=40))
def test_pages_are_counted(actions: list[tuple[str, int]]) -> None:
    holders = Holders()
    for action in actions:
        holders.act(action)
        holders.group.check(holders.held)
        assert holders.group.free == 6 - len(set(holders.held))
    if holders.held:
        with pytest.raises(AssertionError, match="lost or handed out twice"):
            holders.group.check(holders.held[1:])
