"""Number formats of stored weights against the gguf package, and parts of mapped files."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from forerun.kernels.formats import FORMATS, GGUF_FORMATS, MLX_BITS, MLX_GROUPS, Format
from forerun.kernels.parts import WeightPart

GGML = {name: gguf.GGMLQuantizationType[name.upper()] for name in FORMATS if not name.startswith("mlx")}
BLOCKS = sorted(GGML.keys() - {"f32", "f16", "bf16"})
# Where the float16 factors of a block are.
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "mxfp4": (),
}
MLX = [f"mlx{bits}_{group}" for bits in MLX_BITS for group in MLX_GROUPS]


def random_blocks(name: str, count: int = 200, seed: int = 0) -> np.ndarray:
    """Any bytes, with any finite factors: tiny, huge, negative and zero."""
    random = np.random.default_rng([seed, *name.encode()])
    raw = random.integers(0, 256, (count, FORMATS[name].bytes), np.uint8)
    for start in HALVES[name]:
        factors = random.integers(0, 2**16, count, np.uint16)
        factors[np.isinf(factors.view(np.float16)) | np.isnan(factors.view(np.float16))] = 0x8000
        raw[:, start : start + 2] = factors[:, None].view(np.uint8)
    return raw


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """One long little-endian number: code k has the bits from k · bits on."""
    whole = sum(int(code) << (bits * index) for index, code in enumerate(codes))
    return np.frombuffer(whole.to_bytes(len(codes) * bits // 8, "little"), np.uint8)


def random_affine(form: Format, rows: int = 6, groups: int = 3) -> tuple[WeightPart, np.ndarray]:
    """A matrix as MLX stores one, and its values."""
    random = np.random.default_rng(form.bits * form.weights)
    codes = random.integers(0, 2**form.bits, (rows, groups * form.weights))
    scales = random.normal(size=(rows, groups)).astype(np.float16)
    biases = random.normal(size=(rows, groups)).astype(np.float16)
    raw = np.stack([bit_stream(row, form.bits) for row in codes])
    apart = [
        WeightPart(FORMATS["f16"], each.view(np.uint8).reshape(rows, -1), (rows, groups)) for each in (scales, biases)
    ]
    spread = [np.repeat(each.astype(np.float32), form.weights, 1) for each in (scales, biases)]
    return WeightPart(form, raw, codes.shape, None, *apart), spread[0] * codes.astype(np.float32) + spread[1]


@pytest.mark.parametrize("name", sorted(GGML))
def test_the_sizes_and_numbers_are_those_of_gguf(name: str) -> None:
    form = FORMATS[name]
    assert (form.weights, form.bytes) == gguf.GGML_QUANT_SIZES[GGML[name]]
    assert form.number == GGML[name].value and GGUF_FORMATS[form.number] is form


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_means_what_gguf_says_bit_for_bit(name: str) -> None:
    raw = random_blocks(name)
    found, wanted = FORMATS[name].unpack(raw), dequantize(raw, GGML[name])
    assert found.dtype == np.float32 and np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_floats_mean_what_they_are(name: str) -> None:
    raw = quantize(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), GGML[name]).view(np.uint8)
    found = FORMATS[name].unpack(raw.reshape(-1, FORMATS[name].bytes)).reshape(4, 64)
    assert np.array_equal(found, dequantize(raw, GGML[name]).reshape(4, 64))


@pytest.mark.parametrize("name", [*BLOCKS, *MLX])
def test_codes_scales_and_minima_make_the_values(name: str) -> None:
    form = FORMATS[name]
    if form.affine:
        part, wanted = random_affine(form)
        codes = part.split()
        wanted = wanted.reshape(-1, form.weights)
    else:
        raw = random_blocks(name)
        codes, wanted = form.split(raw), form.unpack(raw)
    assert codes.code.dtype == np.uint8 and codes.code.max() < 2**codes.bits and codes.bits == form.bits
    assert codes.length in (16, 32) and codes.inner.shape == (len(wanted), form.weights // codes.length)
    assert codes.inner.dtype.itemsize == 1 and codes.outer.shape == (len(wanted),)
    exact = codes.outer.astype(np.float64)[:, None] * codes.inner
    assert np.array_equal(exact, codes.scale), "scales are exact products"
    numbers = codes.table[codes.code] if codes.table is not None else codes.code.astype(np.int16) - codes.zero
    values = np.repeat(exact, codes.length, 1) * numbers
    assert np.array_equal(values, values.astype(np.float32)), "what is multiplied is exact in float32"
    if codes.outer_minimum is not None:
        values -= np.repeat(codes.outer_minimum.astype(np.float64)[:, None] * codes.inner_minimum, codes.length, 1)
    assert np.array_equal(values.astype(np.float32), wanted), "one rounding, that of the subtraction"


@pytest.mark.parametrize("name", MLX)
def test_affine_groups_are_scale_times_code_and_bias(name: str) -> None:
    part, wanted = random_affine(FORMATS[name])
    assert np.array_equal(part.rows(), wanted)
    assert part.nbytes == wanted.size * FORMATS[name].bits // 8 + wanted.size // FORMATS[name].weights * 4
    order = np.array([4, 0, 0, 5])
    assert np.array_equal(part[order].rows(1, 4), wanted[order[1:]])


def stored(name: str, *shape: int) -> WeightPart:
    """A part with random blocks."""
    form = FORMATS[name]
    count = int(np.prod(shape)) // form.weights
    raw = random_blocks(name, count).reshape(*shape[:-1], form.row_bytes(shape[-1]))
    return WeightPart(form, raw, shape)


def test_some_rows_of_a_part_are_decoded_in_the_order_of_the_row_map() -> None:
    part = stored("q6_k", 10, 512)
    values = part.rows()
    order = np.array([7, 1, 1, 4, 9])
    mapped = part[order]
    assert mapped.shape == (5, 512) and mapped.nbytes == 5 * 420
    assert np.array_equal(mapped.rows(), values[order])
    assert np.array_equal(mapped.rows(1, 3), values[order[1:3]])
    assert np.array_equal(mapped[np.array([3, 0])].rows(), values[[4, 7]])
    assert np.array_equal(mapped[2:].rows(), values[order[2:]])
    assert np.array_equal(part[3:6].rows(1), values[4:6])
    assert np.array_equal(mapped.split(1, 3).values().reshape(2, 512), values[order[1:3]])


def test_parts_are_views() -> None:
    part = stored("q4_0", 10, 64)
    for view in (part[2:5], part[np.array([3, 1])]):
        assert np.shares_memory(view.raw, part.raw)
    stack = stored("q4_k", 3, 4, 256)
    assert np.shares_memory(stack[1].raw, stack.raw) and stack[1].shape == (4, 256)
    assert np.array_equal(stack[1].rows(), stack.rows()[1])
    assert np.array_equal(stack[1:].rows(0, 2), stack.rows()[1:, :2])


def test_many_rows_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    part = stored("q5_1", 7, 32)
    whole = part.rows()
    monkeypatch.setattr("forerun.kernels.parts.PIECE_VALUES", 70)
    assert np.array_equal(part.rows(), whole) and np.array_equal(part.rows(2, 5), whole[2:5])
