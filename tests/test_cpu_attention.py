"""Attention on a CPU: the reference's values, and for every row the same bits alone, in pieces and beside others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from cpu_bodies import FIRST, OTHERS, kernels_of, random, same_bits
from passes import one_sequence, ragged
from torch import Tensor

from forerun.kernels.cpu.machine import Body
from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.interface import Angles, AttentionSpec, HeadLayout, HeadNorms, LayerPages, PassRows
from forerun.kernels.reference import ReferenceKernels

LENGTH = 280  # tokens: beyond the first group of 256 keys
SHAPES = [(12, 8), (16, 8), (20, 8), (24, 8), (16, 64), (64, 64), (128, 64), (256, 64)]  # head size, page
SHORT = [(20, 8), (16, 8), (64, 64)]
WAYS: list[dict[str, Any]] = [{}, {"window": 21}, {"softcap": 2.0, "scale": 0.5}, {"window": 100, "softcap": 30.0}]
NAN = float("nan")


@dataclass
class Layer:
    """One layer and a text of random rows for it."""

    size: int
    page: int
    heads: int = 6
    kv_heads: int = 2
    norms: HeadNorms | None = None

    def __post_init__(self) -> None:
        self.layout = HeadLayout(self.heads, self.kv_heads, self.size)
        self.text = random(LENGTH, self.layout.width, seed=2)
        turned = torch.arange(LENGTH)[:, None] * torch.logspace(0, -3, self.size // 2)
        self.angles = Angles(turned.cos().contiguous(), turned.sin().contiguous())
        self.count = -(-LENGTH // self.page)
        order = torch.randperm(self.count + 2, generator=torch.Generator().manual_seed(0))
        self.table = order[: self.count].tolist()

    def pages(self) -> LayerPages:
        """Nothing but NaN, so that what no row has written shows."""
        keys = torch.full((self.count + 2, self.kv_heads, self.size, self.page), NAN)
        return LayerPages(keys, torch.full((self.count + 2, self.kv_heads, self.page, self.size), NAN))

    def rows(self, start: int, stop: int) -> PassRows:
        return ragged([stop - start], [start], [self.table])

    def run(self, kernels: Any, start: int, stop: int, pages: LayerPages, spec: AttentionSpec) -> Tensor:
        """Rows start to stop of the text: stored, and what they read."""
        rows, qkv = self.rows(start, stop), self.text[start:stop].clone()
        kernels.rotate_and_store(qkv, self.layout, rows, pages, self.angles, self.norms)
        found: Tensor = kernels.attention(qkv, spec, rows, pages)
        return found

    def in_pieces(self, kernels: Any, step: int, spec: AttentionSpec, begin: int = 0) -> Tensor:
        """Rows from `begin` on, `step` at a time."""
        pages = self.pages()
        if begin:
            self.run(kernels, 0, begin, pages, spec)
        borders = [*range(begin, LENGTH, step), LENGTH]
        return torch.cat([self.run(kernels, *span, pages, spec) for span in pairwise(borders)])

    def reference(self, spec: AttentionSpec) -> Tensor:
        slow, rows, qkv, pages = ReferenceKernels(), self.rows(0, LENGTH), self.text.clone(), self.pages()
        slow.rotate_and_store(qkv, self.layout, rows, pages, self.angles, self.norms)
        return slow.attention(qkv, spec, rows, pages)


@pytest.mark.parametrize(("size", "page"), SHAPES)
def test_pieces_of_any_size_give_the_same_bits(size: int, page: int) -> None:
    kernels, layer = kernels_of(FIRST), Layer(size, page)
    for way in WAYS:
        spec = AttentionSpec(layer.layout, **way)
        whole = layer.run(kernels, 0, LENGTH, layer.pages(), spec)
        torch.testing.assert_close(whole, layer.reference(spec), atol=1e-5, rtol=1e-5)
        for step in (7, 64):
            assert same_bits(layer.in_pieces(kernels, step, spec), whole), f"{way}, {step} at a time"
        assert same_bits(layer.in_pieces(kernels, 1, spec, 245), whole[245:]), f"{way}, one by one"


def check_other_body(body: Body, size: int, page: int) -> None:
    layer = Layer(size, page)
    for way in (WAYS[0], WAYS[3]):
        spec = AttentionSpec(layer.layout, **way)
        wanted = layer.run(kernels_of(FIRST), 0, LENGTH, layer.pages(), spec)
        for step in (7, LENGTH):
            assert same_bits(layer.in_pieces(kernels_of(body), step, spec), wanted)


@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.name)
def test_bodies_agree_to_the_bit(body: Body) -> None:
    for size, page in SHORT if body.needs else SHORT[:1]:  # without vectors of its own a body takes long to compile
        check_other_body(body, size, page)


@pytest.mark.long
@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.name)
@pytest.mark.parametrize(("size", "page"), SHAPES)
def test_bodies_agree_to_the_bit_in_every_shape(body: Body, size: int, page: int) -> None:
    check_other_body(body, size, page)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (5, 1), (20, 1), (64, 1)])
def test_any_number_of_heads_shares_a_key_head(heads: int, kv_heads: int) -> None:
    kernels, layer = kernels_of(FIRST), Layer(16, 8, heads, kv_heads)
    spec = AttentionSpec(layer.layout)
    whole = layer.run(kernels, 0, LENGTH, layer.pages(), spec)
    torch.testing.assert_close(whole, layer.reference(spec), atol=1e-5, rtol=1e-5)
    assert same_bits(layer.in_pieces(kernels, 33, spec), whole)


@pytest.mark.parametrize("window", [0, 13])
def test_sequences_do_not_see_each_other(window: int) -> None:
    """Three in one pass: a prompt, a few drafts behind a long text, and the first token of another."""
    kernels, layer = kernels_of(FIRST), Layer(20, 8)
    spec = AttentionSpec(layer.layout, window)
    pages = LayerPages(random(60, 2, 20, 8), random(60, 2, 8, 20, seed=1))
    tables = [list(range(10, 15)), list(range(20, 55)), [7]]
    rows = ragged([33, 5, 1], [0, 270, 0], tables)
    qkv = random(39, layer.layout.width, seed=5)
    alone = [qkv[start : start + count].clone() for _, start, count in rows.spans()]
    mine = LayerPages(pages.keys.clone(), pages.values.clone())
    kernels.rotate_and_store(qkv, layer.layout, rows, pages, layer.angles, None)
    together = kernels.attention(qkv, spec, rows, pages)
    for sequence, start, count in rows.spans():
        one = one_sequence(rows, sequence)
        kernels.rotate_and_store(alone[sequence], layer.layout, one, mine, layer.angles, None)
        assert same_bits(alone[sequence], qkv[start : start + count])
        found = kernels.attention(alone[sequence], spec, one, mine)
        assert same_bits(found, together[start : start + count])
    assert same_bits(mine.keys, pages.keys) and same_bits(mine.values, pages.values)


@pytest.mark.parametrize("window", [0, 21])
def test_rows_of_a_picture_see_each_other_in_layers_with_a_window(window: int) -> None:
    kernels, layer = kernels_of(FIRST), Layer(16, 8)
    spec, rows = AttentionSpec(layer.layout, window), layer.rows(0, LENGTH)
    together = torch.full((LENGTH,), -1)
    together[5:14], together[14:31], together[100:140] = 0, 1, 2
    rows.together = together
    found = []
    for each in (kernels, ReferenceKernels()):
        qkv, pages = layer.text.clone(), layer.pages()
        each.rotate_and_store(qkv, layer.layout, rows, pages, layer.angles, None)
        found.append(each.attention(qkv, spec, rows, pages))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    plain = layer.run(kernels, 0, LENGTH, layer.pages(), spec)
    assert same_bits(found[0][:5], plain[:5]) and same_bits(found[0], plain) == (window == 0)


@pytest.mark.parametrize("body", (FIRST, *OTHERS), ids=lambda body: body.name)
def test_norms_of_heads_and_turns(body: Body) -> None:
    """Against torch; of queries alone where the keys are another layer's; parts of a head that do not turn stay."""
    kernels, slow = kernels_of(body), ReferenceKernels()
    for size, turned, values in ((12, 12, None), (20, 10, random(20, seed=9)), (64, 64, None)):
        layer = Layer(size, 8)
        norms = HeadNorms(random(size, seed=7), random(size, seed=8), 1e-6, values)
        angles = Angles(*(each[:, : turned // 2].contiguous() for each in (layer.angles.cos, layer.angles.sin)))
        for heads, kv_heads, given in ((6, 2, norms), (6, 2, None), (6, 0, norms)):
            layout = HeadLayout(heads, kv_heads, size)
            mine, theirs = (layer.text[:30, : layout.width].clone() for _ in range(2))
            pages, twins, rows = layer.pages(), layer.pages(), layer.rows(0, 30)
            kernels.rotate_and_store(mine, layout, rows, pages, angles, given)
            slow.rotate_and_store(theirs, layout, rows, twins, angles, given)
            torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=3e-6)
            first = layer.text[:30, : layout.width].clone()
            kernels_of(FIRST).rotate_and_store(first, layout, rows, layer.pages(), angles, given)
            assert same_bits(mine, first)
            if kv_heads:
                wrote = pages.keys.isnan() == twins.keys.isnan()
                assert wrote.all() and pages.values.isnan().equal(twins.values.isnan())
                assert same_bits(pages.values[layer.table[0], 1, 3], mine[3, layout.value_column + size :])
                assert same_bits(pages.keys[layer.table[1], 0, :, 5], mine[13, layout.key_column :][:size])
            else:
                assert pages.keys.isnan().all(), "queries alone store nothing"


def test_what_lies_beyond_a_row_does_not_reach_it() -> None:
    """In its own page, in pages behind it, and before its window."""
    kernels, layer = kernels_of(FIRST), Layer(16, 8)
    spec, clean = AttentionSpec(layer.layout, 11), layer.pages()
    layer.run(kernels, 0, 100, clean, spec)
    wanted = layer.run(kernels, 100, 103, clean, spec)
    spoiled = LayerPages(torch.full_like(clean.keys, NAN), torch.full_like(clean.values, NAN))
    for at in range(100 - 10, 103):
        page, slot = layer.table[at // 8], at % 8
        spoiled.keys[page, :, :, slot] = clean.keys[page, :, :, slot]
        spoiled.values[page, :, slot] = clean.values[page, :, slot]
    assert same_bits(layer.run(kernels, 100, 103, spoiled, spec), wanted)


def test_infinite_and_broken_rows_keep_to_themselves() -> None:
    """A row that is no number spoils those behind it in its own text, and none before it."""
    kernels, layer = kernels_of(FIRST), Layer(16, 8)
    spec = AttentionSpec(layer.layout)
    clean = layer.run(kernels, 0, LENGTH, layer.pages(), spec)
    layer.text[40] = NAN
    found = layer.run(kernels, 0, LENGTH, layer.pages(), spec)
    assert same_bits(found[:40], clean[:40]) and found[40].isnan().all()


def test_threads_change_no_bits() -> None:
    layer, spec = Layer(16, 8), AttentionSpec(Layer(16, 8).layout)
    several: CpuKernels = kernels_of(FIRST, threads=3)
    several.library.threads.allowed = 3
    wanted = layer.run(kernels_of(FIRST), 0, LENGTH, layer.pages(), spec)
    assert same_bits(layer.run(several, 0, LENGTH, layer.pages(), spec), wanted)
