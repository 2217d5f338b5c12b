"""Triton rotation, storing and attention against the reference, and rows against the same rows alone."""

from __future__ import annotations

import pytest
import torch
from passes import one_sequence
from torch import Tensor

from forerun.kernels.gpu import attention as attention_module
from forerun.kernels.gpu.attention import attention
from forerun.kernels.gpu.rotate_and_store import rotate_and_store
from forerun.kernels.interface import Angles, AttentionSpec, HeadLayout, LayerPages, PassRows
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter takes the bits of bfloat16 numbers for integers in a product.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PAGE = 16
SPARE = 0


@pytest.fixture(autouse=True)
def fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention_module, "splits", lambda kv_heads: 4)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_rows(positions: list[int], width: int, pages: int) -> PassRows:
    """Sequences with `pages` pages each, scattered over a pool; the last columns of the table are spare."""
    places = 1 + torch.randperm(len(positions) * pages, generator=torch.Generator().manual_seed(3))
    table = torch.full((len(positions), pages + 2), SPARE, dtype=torch.int32)
    table[:, :pages] = places.view(len(positions), pages)
    return PassRows.uniform(
        width,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        [table.to(DEVICE)],
        torch.zeros(len(positions), dtype=torch.int32, device=DEVICE),
    )


def empty_pages(layout: HeadLayout, rows: PassRows, dtype: torch.dtype = torch.float32, page: int = PAGE) -> LayerPages:
    """A pool in which nothing has been written yet: all NaN."""
    count = int(rows.block_tables[0].max()) + 1
    return LayerPages(
        torch.full((count, layout.kv_heads, layout.size, page), float("nan"), dtype=dtype, device=DEVICE),
        torch.full((count, layout.kv_heads, page, layout.size), float("nan"), dtype=dtype, device=DEVICE),
    )


def fill(layer: LayerPages, layout: HeadLayout, rows: PassRows, sequences: int | None = None) -> None:
    """Random keys and values up to the last row of each sequence, or of the first ones."""
    for sequence, start, count in rows.spans()[:sequences]:
        length = int(rows.position[sequence]) + count
        fill_up_to(length, layer, layout, rows, sequence, 5 + start)


def fill_up_to(length: int, layer: LayerPages, layout: HeadLayout, rows: PassRows, sequence: int, seed: int) -> None:
    past = random(length, layout.width, seed=seed, dtype=layer.keys.dtype)
    here = [table[sequence : sequence + 1] for table in rows.block_tables]
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ReferenceKernels().store(past, layout, PassRows.uniform(length, zero, here, zero), layer)


def attend(qkv: Tensor, layout: HeadLayout, rows: PassRows, layer: LayerPages, window: int = 0) -> Tensor:
    return attend_as(AttentionSpec(layout, window), qkv, rows, layer)


def attend_as(spec: AttentionSpec, qkv: Tensor, rows: PassRows, layer: LayerPages) -> Tensor:
    counters = torch.zeros(1 << 10, dtype=torch.int32, device=qkv.device)
    out = attention(qkv, spec, rows, layer, counters)
    assert not counters.any()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [HeadLayout(2, 2, 64), HeadLayout(6, 2, 24), HeadLayout(8, 1, 16)])
def test_attention_agrees(layout: HeadLayout, dtype: torch.dtype) -> None:
    """Groups of 1, 3 and 8 query heads."""
    rows = make_rows([14, 0, 37], 3, 4)  # the first crosses a page
    layer = empty_pages(layout, rows, dtype)
    fill(layer, layout, rows)
    qkv = random(9, layout.width + 8, seed=1, dtype=dtype)  # more columns follow
    out = attend(qkv, layout, rows, layer)
    expected = ReferenceKernels().attention(qkv, AttentionSpec(layout), rows, layer, False)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_windows(window: int) -> None:
    layout = HeadLayout(3, 1, 16)
    rows = make_rows([14, 0, 75], 4, 5)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    qkv = random(12, layout.width, seed=1)
    out = attend(qkv, layout, rows, layer, window)
    expected = ReferenceKernels().attention(qkv, AttentionSpec(layout, window), rows, layer, False)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    for sequence in range(3):  # a tile starts where its first row does, a row alone where it does itself
        for offset in (0, 3):
            row = sequence * 4 + offset
            alone = attend(qkv[row : row + 1], layout, one_sequence(rows, sequence, offset, 1), layer, window)
            assert torch.equal(alone[0], out[row])


def test_a_window_that_wraps_around_the_splits() -> None:
    """The window begins in the block of the last split and ends in that of the second."""
    layout = HeadLayout(1, 1, 16)
    parts = attention_module.splits(1)
    rows = make_rows([(parts + 1) * PAGE + 3], 2, parts + 2)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    qkv = random(2, layout.width, seed=1)
    for window in (30, 3 * PAGE):
        out = attend(qkv, layout, rows, layer, window)
        expected = ReferenceKernels().attention(qkv, AttentionSpec(layout, window), rows, layer, False)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_split_with_several_blocks() -> None:
    layout = HeadLayout(2, 1, 16)
    parts = attention_module.splits(1)
    rows = make_rows([parts * PAGE * 2 + 5, 7], 1, 2 * parts + 1)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    qkv = random(2, layout.width, seed=1) * 3  # weights differ much, so the running maximum matters
    out = attend(qkv, layout, rows, layer)
    expected = ReferenceKernels().attention(qkv, AttentionSpec(layout), rows, layer, False)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    alone = attend(qkv[:1], layout, one_sequence(rows, 0, 0, 1), layer)
    assert torch.equal(alone[0], out[0])


def test_blocks_shorter_than_a_page() -> None:
    """Heads of 256 take 32 keys at a time."""
    layout = HeadLayout(2, 1, 256)
    rows = make_rows([95, 4], 2, 2)  # the first crosses the middle of a page
    layer = empty_pages(layout, rows, page=64)
    fill(layer, layout, rows)
    qkv = random(4, layout.width, seed=1)
    for window in (0, 40):
        out = attend(qkv, layout, rows, layer, window)
        expected = ReferenceKernels().attention(qkv, AttentionSpec(layout, window), rows, layer, False)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_several_tiles_of_rows() -> None:
    """Width 5 · 8 query heads: three tiles, the last of 8 rows; the second begins within a page, ends in the next."""
    layout = HeadLayout(8, 1, 16)
    rows = make_rows([13, 2], 5, 2)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    qkv = random(10, layout.width, seed=1)
    out = attend(qkv, layout, rows, layer)
    expected = ReferenceKernels().attention(qkv, AttentionSpec(layout), rows, layer, False)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    for row in range(10):
        alone = attend(qkv[row : row + 1], layout, one_sequence(rows, row // 5, row % 5, 1), layer)
        assert torch.equal(alone[0], out[row])


def test_the_merge_waits_for_all_splits() -> None:
    """Two inputs in turn: scratch that is read too early holds the other one's results."""
    layout = HeadLayout(6, 2, 64)
    lengths, times = ([100, 500, 37, 1000] * 8, 100) if DEVICE == "cuda" else ([40, 7], 1)
    rows = make_rows(lengths, 3, max(lengths) // PAGE + 1)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    inputs = [random(3 * len(lengths), layout.width, seed=seed) for seed in (1, 2)]
    outputs = [
        torch.cat([attend(x[i : i + 1], layout, one_sequence(rows, i // 3, i % 3, 1), layer) for i in range(6)])
        for x in inputs
    ]
    for _ in range(times):
        for x, expected in zip(inputs, outputs, strict=True):
            assert torch.equal(attend(x, layout, rows, layer)[:6], expected)


@pytest.mark.parametrize("spec", [{"softcap": 2.0}, {"scale": 1.0}, {"softcap": 1.0, "scale": 0.5, "window": 7}])
def test_caps_and_scales_of_scores(spec: dict[str, float]) -> None:
    layout = HeadLayout(4, 2, 16)
    rows = make_rows([14, 30], 3, 3)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows)
    qkv = random(6, layout.width, seed=1) * 3
    how = AttentionSpec(layout, **spec)  # type: ignore[arg-type]
    out = attend_as(how, qkv, rows, layer)
    expected = ReferenceKernels().attention(qkv, how, rows, layer, False)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(out, attend(qkv, layout, rows, layer), atol=1e-2)


def test_a_layer_that_reads_the_keys_of_another() -> None:
    """Queries alone: nothing is stored, and the pages say how many key heads there are."""
    theirs, mine = HeadLayout(2, 2, 16), HeadLayout(6, 0, 16)
    rows = make_rows([14, 30], 3, 3)
    layer = empty_pages(theirs, rows)
    fill(layer, theirs, rows)
    before = LayerPages(layer.keys.clone(), layer.values.clone())
    angle = random(40, 8, seed=4) * 3
    tables, norms = (angle.cos(), angle.sin()), (random(16, seed=5), None)
    queries = random(6, mine.width, seed=1)
    rotated = queries.clone()
    rotate_and_store(queries, mine, rows, layer, *tables, *norms, 1e-6)
    reference_store(rotated, mine, rows, layer, tables, norms)
    torch.testing.assert_close(queries, rotated, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(layer.keys, before.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(layer.values, before.values, rtol=0, atol=0, equal_nan=True)
    expected = ReferenceKernels().attention(queries, AttentionSpec(mine), rows, layer, False)
    torch.testing.assert_close(attend(queries, mine, rows, layer), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_idle_lanes_do_no_harm() -> None:
    """They read and write the spare page, which may hold anything."""
    layout = HeadLayout(4, 2, 16)
    rows = make_rows([14, 0, 0], 3, 2)
    layer = empty_pages(layout, rows)
    fill(layer, layout, rows, 1)
    rows.block_tables[0][1:] = SPARE
    qkv = random(9, layout.width, seed=1)
    out = attend(qkv, layout, rows, layer)
    expected = ReferenceKernels().attention(qkv[:3], AttentionSpec(layout), one_sequence(rows, 0), layer, False)
    torch.testing.assert_close(out[:3], expected, atol=2e-5, rtol=2e-5)


def reference_store(
    qkv: Tensor,
    layout: HeadLayout,
    rows: PassRows,
    layer: LayerPages,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
) -> None:
    slow = ReferenceKernels()
    for first, heads, norm in zip((0, layout.key_column), (layout.heads, layout.kv_heads), norms, strict=True):
        if norm is not None:
            slow.head_norm(qkv, first, heads, norm, 1e-6)
        slow.rotate(qkv, first, heads, layout.size, rows, Angles(*tables))
    if layout.kv_heads:
        slow.store(qkv, layout, rows, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normed", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("size", "half"), [(24, 12), (64, 8)])  # the second leaves 48 columns as they are
def test_rotate_and_store_agrees(size: int, half: int, normed: tuple[bool, bool], dtype: torch.dtype) -> None:
    layout = HeadLayout(3, 1, size)
    rows = make_rows([15, 0], 2, 2)  # the first crosses a page
    mine, theirs = empty_pages(layout, rows, dtype), empty_pages(layout, rows, dtype)
    angle = random(40, half, seed=4) * 3
    tables = angle.cos(), angle.sin()
    norms = random(size, seed=5) if normed[0] else None, random(size, seed=6) if normed[1] else None
    qkv = random(4, layout.width + 8, seed=1, dtype=dtype) * 4
    untouched, expected = qkv.clone(), qkv.clone()
    rotate_and_store(qkv, layout, rows, mine, *tables, *norms, 1e-6)
    reference_store(expected, layout, rows, theirs, tables, norms)
    rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    close = {"rtol": rounding, "atol": rounding * 8, "equal_nan": True}  # a cancelling pair rounds as its parts do
    queries = slice(0, layout.key_column)
    torch.testing.assert_close(qkv[:, queries], expected[:, queries], **close)
    assert torch.equal(qkv[:, layout.key_column :], untouched[:, layout.key_column :])
    torch.testing.assert_close(mine.keys, theirs.keys, **close)
    torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=0, equal_nan=True)
    if dtype in DTYPES[1:]:  # rounded at the same places; the interpreter cuts bfloat16 off
        assert (qkv[:, queries] == expected[:, queries]).float().mean() > 0.97
    if normed == (False, False) and 2 * half < size:  # columns that nothing touches
        rest = qkv[:, queries].unflatten(1, (3, size))[..., 2 * half :]
        assert torch.equal(rest, untouched[:, queries].unflatten(1, (3, size))[..., 2 * half :])


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (9, DTYPES[-1])])
def test_a_sequence_alone_step_by_step_has_the_bits_it_has_in_a_batch(window: int, dtype: torch.dtype) -> None:
    """Rows of three sequences at width 5 against each sequence alone, a row at a time, in pages of its own."""
    layout = HeadLayout(3, 1, 24)
    rows = make_rows([14, 3, 28], 5, 3)
    batch = empty_pages(layout, rows, dtype)
    for sequence, start, _ in rows.spans():
        fill_up_to(int(rows.position[sequence]), batch, layout, rows, sequence, 5 + start)
    steps = LayerPages(batch.keys.clone(), batch.values.clone())
    angle = random(40, 8, seed=4) * 3
    rotary = angle.cos(), angle.sin(), random(24, seed=5), random(24, seed=6), 1e-6
    qkv = random(15, layout.width, seed=1, dtype=dtype)
    before = qkv.clone()
    rotate_and_store(qkv, layout, rows, batch, *rotary)
    out = attend(qkv, layout, rows, batch, window)
    assert out.isfinite().all()
    for row in range(15):
        alone, step = before[row : row + 1].clone(), one_sequence(rows, row // 5, row % 5, 1)
        rotate_and_store(alone, layout, step, steps, *rotary)
        assert torch.equal(alone, qkv[row : row + 1])
        assert torch.equal(attend(alone, layout, step, steps, window)[0], out[row])
    torch.testing.assert_close(batch.keys, steps.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.values, steps.values, rtol=0, atol=0, equal_nan=True)
