"""Triton rotation, storing and attention against plain torch, and rows against the same rows in every other pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from passes import tabled
from torch import Tensor

from forerun.kernels.gpu import attention as attention_module
from forerun.kernels.gpu.attention import attention
from forerun.kernels.gpu.rotate_and_store import rotate_and_store
from forerun.kernels.interface import CHUNK_ROWS, WIDEST, AttentionSpec, HeadLayout, LayerPages, PassRows

pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter takes the bits of bfloat16 numbers for integers in a product.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PAGE = 16
SPARE = 0
Parts = Sequence[tuple[int, int, int]]  # owner, position of the first row, rows


@pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["whole", "split"])
def small_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: contexts of 200 keys have groups of both lengths, and programs with several of them.

    Tiles of prompts are one program each, or one for some of their groups.
    """
    monkeypatch.setattr(attention_module, "SPLIT_ROWS", request.param)
    for name, value in (("NEAR_KEYS", 32), ("FAR_KEYS", 64), ("FAR", 128), ("LONGEST_BLOCK", 16), ("PROGRAMS", 6)):
        monkeypatch.setattr(attention_module, name, value)
    monkeypatch.setattr(attention_module, "LEAST_SPLITS", 2)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scattered(owners: int, pages: int) -> Tensor:
    """A block table whose pages lie anywhere in a pool; its last owner and its last columns have the spare page."""
    places = 1 + torch.randperm(owners * pages, generator=torch.Generator().manual_seed(3))
    table = torch.full((owners + 1, pages + 2), SPARE, dtype=torch.int32)
    table[:owners, :pages] = places.view(owners, pages)
    return table.to(DEVICE)


def empty_pages(layout: HeadLayout, table: Tensor, dtype: torch.dtype = torch.float32, page: int = PAGE) -> LayerPages:
    """A pool in which nothing has been written yet: all NaN."""
    count = int(table.max()) + 1
    return LayerPages(
        torch.full((count, layout.kv_heads, layout.size, page), float("nan"), dtype=dtype, device=DEVICE),
        torch.full((count, layout.kv_heads, page, layout.size), float("nan"), dtype=dtype, device=DEVICE),
    )


def store(past: Tensor, layout: HeadLayout, rows: PassRows, layer: LayerPages) -> None:
    """Keys and values of all rows, one row at a time."""
    assert rows.tables is not None
    keys = past[:, layout.key_column : layout.value_column].unflatten(1, (layout.kv_heads, layout.size))
    values = past[:, layout.value_column : layout.width].unflatten(1, (layout.kv_heads, layout.size))
    for row, (owner, at) in enumerate(zip(rows.tables.owner.tolist(), rows.tables.at.tolist(), strict=True)):
        page = int(rows.table(layer)[owner, at // layer.values.shape[2]])
        layer.keys[page, :, :, at % layer.values.shape[2]] = keys[row]
        layer.values[page, :, at % layer.values.shape[2]] = values[row]


def fill(layer: LayerPages, layout: HeadLayout, table: Tensor, lengths: Sequence[int], scale: float = 1.0) -> None:
    """Random keys and values of the first owners."""
    for owner, length in enumerate(lengths):
        past = random(length, layout.width, seed=5 + owner, dtype=layer.keys.dtype) * scale
        store(past, layout, tabled([], [(owner, 0, length)], table), layer)


def twin(qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
    """Attention of every row by itself, in float64."""
    assert rows.tables is not None
    page, out = layer.values.shape[2], []
    for row, (owner, at) in enumerate(zip(rows.tables.owner.tolist(), rows.tables.at.tolist(), strict=True)):
        low, high = (1, 0) if rows.tables.pictures is None else rows.tables.pictures[row].tolist()
        key = torch.arange(max(at, high) + 1, device=qkv.device)
        seen = key <= at
        if spec.window:
            seen = (seen & (key > at - spec.window)) | ((key >= low) & (key <= high))
        if rows.first is not None:
            seen &= key >= rows.first[owner]
        key = key[seen]
        pages, slots = rows.table(layer)[owner].long()[key // page], key % page
        keys = layer.keys[pages, :, :, slots].transpose(0, 1).double()  # [kv heads, keys, size]
        values = layer.values[pages, :, slots].transpose(0, 1).double()
        queries = qkv[row, : spec.layout.key_column].double().view(len(keys), -1, spec.layout.size)
        scores = queries @ keys.mT * spec.factor
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        out.append((scores.softmax(-1) @ values).flatten())
    return torch.stack(out).to(qkv.dtype)


def attend(qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
    counters = torch.zeros(1 << 10, dtype=torch.int32, device=qkv.device)
    out = attention(qkv, spec, rows, layer, counters)
    assert not counters.any()
    return out


def give_pictures(rows: PassRows, pictures: Parts) -> None:
    """Owner, first and last position of each."""
    assert rows.tables is not None
    lines = []
    for owner, at in zip(rows.tables.owner.tolist(), rows.tables.at.tolist(), strict=True):
        lines.append([1, 0])
        for whose, low, high in pictures:
            if whose == owner and low <= at <= high:
                lines[-1] = [low, high]
    rows.tables.pictures = torch.tensor(lines, dtype=torch.int32, device=DEVICE)


def check_all_ways(
    spec: AttentionSpec,
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    page: int = PAGE,
    first: Sequence[int] | None = None,
    pictures: Parts = (),
    loud: float = 1.0,
    kv_layout: HeadLayout | None = None,
    step: int = 1,
) -> None:
    """All rows of the texts as prompts beside each other: near the twin's. In every other pass: the same bits."""
    layout, kv_layout = spec.layout, kv_layout or spec.layout
    table = scattered(len(lengths), max(lengths) // page + 1)
    layer = empty_pages(kv_layout, table, dtype, page)
    fill(layer, kv_layout, table, lengths, loud)
    starts = [0] * len(lengths) if first is None else first
    if first is not None:  # nothing was ever written there
        for owner, start in enumerate(first):
            for at in range(start):
                for part in (layer.keys[table[owner, at // page]][:, :, at % page : at % page + 1],
                             layer.values[table[owner, at // page]][:, at % page]):  # fmt: skip
                    part.fill_(float("nan"))
    limits = None if first is None else torch.tensor([*first, 0], dtype=torch.int32, device=DEVICE)
    qkv = [random(length, layout.width + 8, seed=50 + n, dtype=dtype) * loud for n, length in enumerate(lengths)]

    def run(turns: Parts, prompts: Parts, padding: int = 0) -> list[Tensor]:
        count = sum(rows for _, _, rows in [*turns, *prompts]) + padding
        entries = (len(turns) + 1, 3, 3) if padding else (0, 0, 0)
        rows = tabled(turns, prompts, table, count, len(lengths), entries)
        rows.first = limits
        if pictures:
            give_pictures(rows, pictures)
        parts = [qkv[owner][at : at + rows] for owner, at, rows in [*turns, *prompts]]
        out = attend(torch.cat([*parts, torch.zeros_like(qkv[0][:padding])]), spec, rows, layer)
        return list(out[: count - padding].split([len(part) for part in parts]))

    whole = [(n, starts[n], length - starts[n]) for n, length in enumerate(lengths)]
    expected = run([], whole)
    rows = tabled([], whole, table)
    rows.first = limits
    if pictures:
        give_pictures(rows, pictures)
    slow = twin(torch.cat([x[start:] for x, start in zip(qkv, starts, strict=True)]), spec, rows, layer)
    close = CLOSE[dtype] * max(1.0, loud)
    torch.testing.assert_close(torch.cat(expected), slow, atol=close, rtol=close)

    for owner, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mine, rows_left = expected[owner], length - start
        (alone,) = run([], [whole[owner]])
        assert torch.equal(alone, mine)
        # Cut anywhere (but pictures must be whole), beside a generated row of another.
        inside = {at for whose, low, high in pictures if whose == owner for at in range(low + 1, high + 1)}
        cuts = [cut for cut in (start + 1, start + rows_left // 3, length - 2) if start < cut < length]
        borders = [start, *[cut for cut in cuts if cut not in inside], length]
        other = (owner + 1) % len(lengths)
        beside = [] if other == owner or pictures else [(other, lengths[other] - 1, 1)]
        for low, high in pairwise(sorted(set(borders))):
            *_, some = run(beside, [(owner, low, high - low)], padding=2)
            assert torch.equal(some, mine[low - start : high - start])
        if pictures:
            continue
        for width in (1, 3, WIDEST):
            for low in range(start, length, max(step, width)):
                high = min(low + width, length)
                (some,) = run([(owner, low, high - low)], [])
                assert torch.equal(some, mine[low - start : high - start]), (owner, low, high)
    # Generated rows of all texts beside each other, and beside the first text as a prompt.
    if not pictures:
        last = [
            (n, max(starts[n], length - 3), length - max(starts[n], length - 3)) for n, length in enumerate(lengths)
        ]
        for prompts in ([], [whole[0]]):
            some = run(last, prompts, padding=3)
            for n, (_, _, count) in enumerate(last):
                assert torch.equal(some[n], expected[n][-count:])
            if prompts:
                assert torch.equal(some[-1], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [HeadLayout(2, 2, 64), HeadLayout(6, 2, 24), HeadLayout(8, 1, 16)])
def test_rows_have_the_same_bits_in_every_pass(layout: HeadLayout, dtype: torch.dtype) -> None:
    """Groups of 1, 3 and 8 query heads."""
    check_all_ways(AttentionSpec(layout), [70, 9], dtype, step=7)


def test_long_contexts() -> None:
    """Six groups, those behind key 128 longer; two programs with three of them each."""
    check_all_ways(AttentionSpec(HeadLayout(3, 1, 16)), [210, 130], step=37)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 70])
def test_windows(window: int) -> None:
    check_all_ways(AttentionSpec(HeadLayout(3, 1, 16), window), [140, 20], step=23)


@pytest.mark.parametrize("spec", [{"softcap": 2.0}, {"scale": 1.0}, {"softcap": 1.0, "scale": 0.5, "window": 7}])
def test_caps_and_scales_of_scores(spec: dict[str, float]) -> None:
    how = AttentionSpec(HeadLayout(4, 2, 16), **spec)  # type: ignore[arg-type]
    check_all_ways(how, [75, 20], loud=3.0, step=23)


def test_the_running_maximum() -> None:
    """Scores differ much, so that peaks rise inside groups and between them."""
    check_all_ways(AttentionSpec(HeadLayout(2, 1, 16)), [150], loud=8.0, step=23)


@pytest.mark.parametrize("window", [0, 30])
def test_first_keys(window: int) -> None:
    """Nothing was written before the first key that an owner's rows may see."""
    check_all_ways(AttentionSpec(HeadLayout(3, 1, 24), window), [90, 50], first=[37, 5], step=23)


@pytest.mark.parametrize("window", [12, 40])
def test_pictures_in_layers_with_a_window(window: int) -> None:
    """One picture is longer than the shorter window, one crosses chunks and groups, and two follow each other."""
    assert CHUNK_ROWS == 64
    pictures = [(0, 10, 35), (0, 36, 50), (0, 90, 131), (1, 3, 9)]
    check_all_ways(AttentionSpec(HeadLayout(3, 1, 16), window), [140, 20], pictures=pictures)


def test_pictures_change_what_rows_see() -> None:
    """In layers with a window alone."""
    layout = HeadLayout(2, 1, 16)
    table = scattered(1, 3)
    layer = empty_pages(layout, table)
    fill(layer, layout, table, [40])
    qkv = random(40, layout.width, seed=1)
    with_picture, without = (tabled([], [(0, 0, 40)], table) for _ in range(2))
    give_pictures(with_picture, [(0, 8, 30)])
    every = [attend(qkv, AttentionSpec(layout), rows, layer) for rows in (with_picture, without)]
    assert torch.equal(*every)
    near = [attend(qkv, AttentionSpec(layout, 25), rows, layer) for rows in (with_picture, without)]
    same = (near[0] == near[1]).all(1)
    assert same.nonzero().flatten().tolist() == [*range(8), *range(30, 40)]


def test_pictures_beside_first_keys() -> None:
    check_all_ways(AttentionSpec(HeadLayout(2, 1, 16), 10), [60, 40], first=[20, 0], pictures=[(0, 25, 45), (1, 3, 30)])


def test_blocks_shorter_than_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "BLOCK_BYTES", 32 * 64 * 4)
    monkeypatch.setattr(attention_module, "LONGEST_BLOCK", 64)
    monkeypatch.setattr(attention_module, "NEAR_KEYS", 64)
    for window in (0, 40):
        check_all_ways(AttentionSpec(HeadLayout(2, 1, 64), window), [150, 5], page=64, step=37)


def test_a_layer_that_reads_the_keys_of_another() -> None:
    """The pages say how many key heads there are."""
    check_all_ways(AttentionSpec(HeadLayout(6, 0, 16)), [75], kv_layout=HeadLayout(2, 2, 16), step=23)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no tensor cores")
@pytest.mark.parametrize("layout", [HeadLayout(9, 3, 64), HeadLayout(32, 8, 128), HeadLayout(16, 4, 256)])
@pytest.mark.parametrize("window", [0, 300])
def test_groups_and_blocks_as_they_are_used(layout: HeadLayout, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check_all_ways(AttentionSpec(layout, window), [1100, 300], torch.bfloat16, page=64, loud=3.0, step=29)


def test_tables_of_a_pass() -> None:
    """Turns first, then prompts cut at multiples of the chunk from position 0 on; then rows and entries that pad it."""
    tables = tabled([(1, 7, 2)], [(0, 60, 70), (2, 64, 3)], scattered(3, 9), 80, 3, (2, 5, 3)).tables
    assert tables is not None and CHUNK_ROWS == 64
    assert tables.owner.tolist() == [1, 1] + [0] * 70 + [2] * 3 + [3] * 5
    assert tables.at.tolist() == [7, 8, *range(60, 130), 64, 65, 66, 0, 0, 0, 0, 0]
    assert tables.turns.tolist() == [[0, 2, 1], [0, 0, 3]]
    assert tables.chunks.tolist() == [[2, 4, 0], [6, 64, 0], [70, 2, 0], [72, 3, 2], [0, 0, 3]]
    assert tables.stretches.tolist() == [[0, 3, 0], [3, 1, 2], [0, 0, 3]]
    assert tables.generated == 2


def test_groups_cover_all_keys_once() -> None:
    module = attention_module
    borders = sorted({min(key, module.FAR) // module.NEAR_KEYS * module.NEAR_KEYS for key in range(module.FAR)})
    borders += range(module.FAR, 400, module.FAR_KEYS)
    for keys in range(1, 400):
        assert module.groups(keys) == sum(border < keys for border in borders)


def test_the_merge_waits_for_all_splits() -> None:
    """Two inputs in turn: scratch that is read too early holds the other one's results."""
    layout = HeadLayout(6, 2, 64)
    lengths, times = ([100, 500, 37, 1000] * 8, 100) if DEVICE == "cuda" else ([70, 7], 1)
    table = scattered(len(lengths), max(lengths) // PAGE + 1)
    layer = empty_pages(layout, table)
    fill(layer, layout, table, lengths)
    spec = AttentionSpec(layout)
    turns = [(n, length - 3, 3) for n, length in enumerate(lengths)]
    inputs = [random(3 * len(lengths), layout.width, seed=seed) for seed in (1, 2)]
    outputs = [
        torch.cat([attend(x[3 * n : 3 * n + 3], spec, tabled([turns[n]], [], table), layer) for n in range(2)])
        for x in inputs
    ]
    for _ in range(times):
        for x, expected in zip(inputs, outputs, strict=True):
            assert torch.equal(attend(x, spec, tabled(turns, [], table), layer)[:6], expected)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_padding_does_no_harm() -> None:
    """Padding rows write to the spare page; entries without rows write nothing."""
    layout = HeadLayout(4, 2, 16)
    table = scattered(2, 3)
    layer = empty_pages(layout, table)
    fill(layer, layout, table, [40, 20])
    before = LayerPages(layer.keys.clone(), layer.values.clone())
    angle = random(40, 8, seed=4)
    rows = tabled([(0, 38, 2)], [(1, 4, 16)], table, 24, 2, (4, 4, 4))
    qkv = random(24, layout.width, seed=1)
    rotate_and_store(qkv, layout, rows, layer, angle.cos(), angle.sin(), None, None, 0.0)
    assert layer.keys[SPARE, :, :, 0].isfinite().all()
    changed = (layer.values != before.values).flatten(1).any(1) & layer.values.flatten(1).isfinite().any(1)
    changed[SPARE] = False
    assert set(changed.nonzero().flatten().tolist()) == {int(table[0, 2]), *table[1, :2].tolist()}
    for kind in (torch.zeros(0, 3), torch.zeros(3, 3)):
        for name in ("turns", "chunks"):
            part = tabled([(0, 38, 2)], [(1, 4, 16)], table, 24, 2)
            assert part.tables is not None
            setattr(part.tables, name, kind.to(DEVICE, torch.int32))
            here = slice(2, 18) if name == "turns" else slice(0, 2)
            out = [attend(qkv, AttentionSpec(layout), each, layer)[here] for each in (rows, part)]
            assert torch.equal(*out) and out[0].isfinite().all()


def reference_store(
    qkv: Tensor,
    layout: HeadLayout,
    rows: PassRows,
    layer: LayerPages,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    by_row: bool = False,
) -> None:
    """Norm, rotation and storing, one after another."""
    assert rows.tables is not None
    at = torch.arange(len(qkv), device=DEVICE) if by_row else rows.tables.at.long()
    cos, sin = (table[at][:, None] for table in tables)
    half = cos.shape[2]
    for first, heads, norm in zip((0, layout.key_column), (layout.heads, layout.kv_heads), norms, strict=True):
        part = qkv[:, first : first + heads * layout.size].unflatten(1, (heads, layout.size))
        if norm is not None:
            wide = part.float()
            part.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm)
        left, right = part[..., :half].float(), part[..., half : 2 * half].float()
        part[..., : 2 * half] = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(qkv.dtype)
    if layout.kv_heads:
        store(qkv, layout, rows, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normed", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("size", "half"), [(24, 12), (64, 8)])  # the second leaves 48 columns as they are
def test_rotate_and_store_agrees(size: int, half: int, normed: tuple[bool, bool], dtype: torch.dtype) -> None:
    layout = HeadLayout(3, 1, size)
    table = scattered(2, 2)
    rows = tabled([(0, 15, 2)], [(1, 0, 2)], table)  # the first crosses a page
    angle = random(40, half, seed=4) * 3
    tables = angle.cos(), angle.sin()
    norms = random(size, seed=5) if normed[0] else None, random(size, seed=6) if normed[1] else None
    before = random(4, layout.width + 8, seed=1, dtype=dtype) * 4
    for by_row in (False, True):
        mine, theirs = empty_pages(layout, table, dtype), empty_pages(layout, table, dtype)
        qkv, expected = before.clone(), before.clone()
        rotate_and_store(qkv, layout, rows, mine, *tables, *norms, 1e-6, by_row=by_row)
        reference_store(expected, layout, rows, theirs, tables, norms, by_row)
        rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        close = {"rtol": rounding, "atol": rounding * 8, "equal_nan": True}  # a cancelling pair rounds as its parts do
        queries = slice(0, layout.key_column)
        torch.testing.assert_close(qkv[:, queries], expected[:, queries], **close)
        assert torch.equal(qkv[:, layout.key_column :], before[:, layout.key_column :])
        torch.testing.assert_close(mine.keys, theirs.keys, **close)
        torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=0, equal_nan=True)
        if dtype in DTYPES[1:]:  # rounded at the same places; the interpreter cuts bfloat16 off
            assert (qkv[:, queries] == expected[:, queries]).float().mean() > 0.97
        if normed == (False, False) and 2 * half < size:  # columns that nothing touches
            rest = qkv[:, queries].unflatten(1, (3, size))[..., 2 * half :]
            assert torch.equal(rest, before[:, queries].unflatten(1, (3, size))[..., 2 * half :])


def test_queries_without_keys_of_their_own() -> None:
    """A layout without key heads: nothing is stored."""
    theirs, mine = HeadLayout(2, 2, 16), HeadLayout(6, 0, 16)
    table = scattered(2, 3)
    rows = tabled([(0, 14, 3), (1, 30, 3)], [], table)
    layer = empty_pages(theirs, table)
    fill(layer, theirs, table, [17, 33])
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


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (9, DTYPES[-1])])
def test_a_prompt_and_the_same_rows_one_by_one(window: int, dtype: torch.dtype) -> None:
    """Norms, rotation, storing and attention: two prompts in one pass against a row at a time in pages of its own."""
    layout, lengths = HeadLayout(3, 1, 24), [38, 11]
    spec, table = AttentionSpec(layout, window), scattered(2, 3)
    batch, steps = empty_pages(layout, table, dtype), empty_pages(layout, table, dtype)
    angle = random(40, 8, seed=4) * 3
    rotary = angle.cos(), angle.sin(), random(24, seed=5), random(24, seed=6), 1e-6
    rows = tabled([], [(n, 0, length) for n, length in enumerate(lengths)], table)
    assert rows.tables is not None
    qkv = random(sum(lengths), layout.width, seed=1, dtype=dtype)
    before = qkv.clone()
    rotate_and_store(qkv, layout, rows, batch, *rotary)
    out = attend(qkv, spec, rows, batch)
    assert out.isfinite().all()
    for row, (owner, at) in enumerate(zip(rows.tables.owner.tolist(), rows.tables.at.tolist(), strict=True)):
        alone, step = before[row : row + 1].clone(), tabled([(owner, at, 1)], [], table)
        rotate_and_store(alone, layout, step, steps, *rotary)
        assert torch.equal(alone, qkv[row : row + 1])
        assert torch.equal(attend(alone, spec, step, steps)[0], out[row])
    torch.testing.assert_close(batch.keys, steps.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.values, steps.values, rtol=0, atol=0, equal_nan=True)
