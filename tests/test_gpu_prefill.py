"""Attention of prompts, on a CPU or a GPU: windows, keys before the chunk, heads of Gemma's size, bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.kernels import prefill
from forerun.kernels.interface import AttentionSpec, Chunk, HeadLayout, LayerPages, PassRows
from forerun.kernels.prefill import prefill_attention

pytestmark = pytest.mark.kernels
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16


def filled(spec: AttentionSpec, length: int, dtype: torch.dtype) -> tuple[LayerPages, Tensor]:
    """Pages of a sequence of random keys and values, in a jumbled order, and their block table."""
    pages = -(-length // PAGE)
    shape = (pages + 1, spec.layout.kv_heads)
    generator = torch.Generator(DEVICE).manual_seed(length)
    keys = torch.randn(*shape, spec.layout.size, PAGE, generator=generator, device=DEVICE).to(dtype)
    values = torch.randn(*shape, PAGE, spec.layout.size, generator=generator, device=DEVICE).to(dtype)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)[None]
    return LayerPages(keys, values), table


def rows_of(position: int, count: int, table: Tensor) -> PassRows:
    start, slot = (torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (position, 0))
    rows = PassRows.uniform(count, start, [table], slot)
    rows.chunk = Chunk(position)
    return rows


def written_out(qkv: Tensor, spec: AttentionSpec, position: int, layer: LayerPages, table: Tensor) -> Tensor:
    """Every row with every key, in float64."""
    heads, group = spec.layout.heads, spec.layout.heads // spec.layout.kv_heads
    keys = layer.keys[table[0].long()].permute(1, 0, 3, 2).flatten(1, 2).double()
    values = layer.values[table[0].long()].permute(1, 0, 2, 3).flatten(1, 2).double()
    queries = qkv[:, : spec.layout.key_column].unflatten(1, (heads, -1)).transpose(0, 1).double()
    out = []
    for head in range(heads):  # one at a time: real shapes have many scores
        scores = queries[head] @ keys[head // group].T * spec.factor
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        row = torch.arange(position, position + len(qkv), device=DEVICE)[:, None]
        key = torch.arange(scores.shape[1], device=DEVICE)
        seen = (key <= row) & ((key > row - spec.window) if spec.window else key >= 0)
        out.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[head // group])
    return torch.cat(out, dim=1)


def compare(spec: AttentionSpec, position: int, count: int, dtype: torch.dtype = torch.float32) -> None:
    layer, table = filled(spec, position + count, dtype)
    qkv = torch.randn(count, spec.layout.width, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    qkv *= 0.2  # scores of a few: one key must not take it all
    expected = written_out(qkv, spec, position, layer, table)
    if spec.window:  # what no row sees may be gone, and may be anything
        gone = max(0, position + 1 - spec.window) // PAGE
        layer.keys[table[0, :gone].long()], layer.values[table[0, :gone].long()] = float("nan"), float("nan")
        table[0, :gone] = -1
    found = prefill_attention(qkv, spec, rows_of(position, count, table), layer)
    close = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 5, 24, 100])
@pytest.mark.parametrize(("position", "count"), [(0, 21), (0, 64), (16, 31), (48, 40)])
def test_rows_see_what_they_should(
    position: int, count: int, window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Borders of pages, of the rows that go together and of windows lie in each other's way."""
    monkeypatch.setattr(prefill, "QUERIES", 12)
    compare(AttentionSpec(HeadLayout(6, 2, 8), window, scale=1.0, softcap=softcap), position, count)


def test_rows_look_at_no_more_keys_than_a_window_and_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So work grows with the prompt and not with its square, on layers with a window."""
    looked = []

    def attention(queries: Tensor, keys: Tensor, *others: object) -> Tensor:
        looked.append((queries.shape[1], keys.shape[1]))
        return queries

    monkeypatch.setattr(prefill, "QUERIES", 12)
    monkeypatch.setattr(prefill, "causal_attention", attention)
    spec = AttentionSpec(HeadLayout(2, 1, 8), 20)
    layer, table = filled(spec, 100, torch.float32)
    prefill_attention(torch.zeros(60, spec.layout.width, device=DEVICE), spec, rows_of(40, 60, table), layer)
    assert looked == [(12, 31)] * 5


# Heads of Gemma 4: with a window, without one, without one where one key head serves all.
REAL = [
    AttentionSpec(HeadLayout(8, 2, 256), 512, scale=1.0),
    AttentionSpec(HeadLayout(8, 2, 512), 0, scale=1.0),
    AttentionSpec(HeadLayout(16, 1, 512), 0, scale=1.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", REAL, ids=["window", "full", "one key head"])
@pytest.mark.parametrize(("position", "count"), [(0, 700), (2048, 1111)])
def test_real_shapes(spec: AttentionSpec, position: int, count: int) -> None:
    compare(spec, position, count, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", REAL, ids=["window", "full", "one key head"])
def test_a_long_prompt_takes_little_memory(spec: AttentionSpec, capsys: pytest.CaptureFixture[str]) -> None:
    """The last chunk of 32 k tokens: all scores of 16 heads at once would take 4 GiB in float32."""
    position, count = 30 * 1024, 2048
    layer, table = filled(spec, position + count, torch.bfloat16)
    qkv, rows = torch.randn(count, spec.layout.width, device=DEVICE).bfloat16(), rows_of(position, count, table)
    prefill_attention(qkv, spec, rows, layer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, marks = torch.cuda.memory_allocated(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    prefill_attention(qkv, spec, rows, layer)
    marks[1].record()
    torch.cuda.synchronize()
    taken, took = (torch.cuda.max_memory_allocated() - before) / 2**20, marks[0].elapsed_time(marks[1])
    with capsys.disabled():
        print(f"\n2048 rows at 30 k, window {spec.window}, heads of {spec.layout.size}: {taken:.0f} MiB, {took:.2f} ms")
    assert taken < 1024
