"""Products on a CPU: every stored format, every body, and rows that know nothing of the rows beside them."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from cpu_bodies import FIRST, OTHERS, kernels_of, matrix_of, packed, random, rounded, same_bits, stored
from torch import Tensor

from forerun.engine.probe import cancelling_rows
from forerun.kernels.cpu.layout import DELTA, HALF_SUM, HALF_SUM_SCALED, RECORD, SUM, SUM_SCALED
from forerun.kernels.cpu.machine import Body
from forerun.kernels.cpu.ops import tiled
from forerun.kernels.cpu.repacking import LAYOUTS
from forerun.kernels.cpu.tiles import TileMemory, pack_floats
from forerun.kernels.formats import FORMATS
from forerun.kernels.interface import Activation
from forerun.kernels.matrix import Parts, Rounded, TiledMatrix, round_to_int8

# Each way to store codes and factors once; the other formats differ from these in numbers only.
WAYS = ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q3_k", "q5_k", "q6_k", "iq4_xs", "mxfp4"]
WAYS += ["mlx3_64", "mlx6_32", "mlx8_128"]
OUTS, INPUTS = 40, 512
ROWS = (*range(1, 65), 512)
DIFFERENT = 17


def spread(x: np.ndarray) -> np.ndarray:
    """Rounded activations as float64 [rows, inputs]."""
    codes, delta = rounded(x)
    return (codes * delta.astype(np.float64)[:, :, None]).reshape(len(x), -1)[:, : x.shape[1]]


def check_values(out: Tensor, x: Tensor, weight: np.ndarray, exact: bool) -> None:
    """Against float64 of the same weights: with rounded activations to float32's precision, with others to 8 bits."""
    weight, ours = weight.astype(np.float64), x.numpy().astype(np.float64)
    seen = ours if exact else spread(x.numpy())
    reach = np.abs(seen) @ np.abs(weight).T
    assert (np.abs(out.numpy() - seen @ weight.T) <= 3e-6 * reach).all()
    wanted = ours @ weight.T
    assert np.linalg.norm(out.numpy() - wanted) < 0.02 * np.linalg.norm(wanted)


def alone_and_together(body: Body, matrix: TiledMatrix, x: Tensor) -> Tensor:
    """Each row by itself; any number of rows in one pass must give the same bits."""
    kernels = kernels_of(body)
    alone = torch.cat([kernels.linear(row, matrix) for row in x.split(1)])
    for rows in ROWS:
        again = torch.arange(rows) % len(x)
        assert same_bits(kernels.linear(x[again], matrix), alone[again]), f"{body.name}: {rows} rows"
    return alone


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    part = stored(name, OUTS, INPUTS)
    matrix, x = matrix_of(part), random(DIFFERENT, INPUTS, seed=1)
    check_values(alone_and_together(FIRST, matrix, x), x, part.rows(), FORMATS[name].floats is not None)


def test_drafts_come_from_the_numbers_of_q4_0() -> None:
    weight = random(OUTS, INPUTS, seed=3)
    weight[0, :32] = 0.0
    quantised = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    wanted = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q4_0)
    x = random(DIFFERENT, INPUTS, seed=1)
    check_values(alone_and_together(FIRST, kernels_of(FIRST).draft_matrix(weight), x), x, wanted, exact=False)


def check_other_bodies(name: str) -> None:
    matrix = matrix_of(stored(name, OUTS, INPUTS))
    x = torch.cat([random(9, INPUTS, seed=1), cancelling_rows(7, INPUTS), random(1, INPUTS) * 1e-42])
    wanted = kernels_of(FIRST).linear(x, matrix)
    for body in OTHERS:
        assert same_bits(alone_and_together(body, matrix, x), wanted), body.name


@pytest.mark.parametrize("name", WAYS)
def test_bodies_agree_to_the_bit(name: str) -> None:
    check_other_bodies(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WAYS])
def test_bodies_agree_to_the_bit_in_all_other_formats(name: str) -> None:
    check_other_bodies(name)


@pytest.mark.parametrize("scales", ["bf16", "f32"])
def test_factors_of_affine_formats_come_in_any_floats(scales: str) -> None:
    part, x = stored("mlx4_64", OUTS, INPUTS, scales), random(5, INPUTS, seed=1)
    matrix = matrix_of(part)
    wanted = kernels_of(FIRST).linear(x, matrix)
    check_values(wanted, x, part.rows(), False)
    for body in OTHERS:
        assert same_bits(kernels_of(body).linear(x, matrix), wanted)


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (16, 1), (17, 31), (30, 20), (131, 1000), (5, 3 * 512)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    """Outputs that fill no tile and inputs that fill no block, in all ways to keep a checkpoint's floats."""
    weight, x = random(*shape), random(6, shape[1], seed=1)
    stored_in_8_bits = Rounded(*round_to_int8(weight))
    for quantize, given in ((False, weight), (True, weight), (True, stored_in_8_bits), (False, stored_in_8_bits)):
        found = []
        for body in (FIRST, *OTHERS):
            kernels = kernels_of(body, quantize)
            matrix = kernels.matrix(given, None)
            assert isinstance(matrix, TiledMatrix) and matrix.shape == shape and matrix.exact == (not quantize)
            found.append(kernels.linear(x, matrix))
            assert same_bits(kernels.linear(x[3:4], matrix), found[-1][3:4])
        assert all(same_bits(out, found[0]) for out in found[1:])
        seen = given.float() if isinstance(given, Rounded) else weight
        error = np.abs(
            found[0].numpy() - (spread(x.numpy()) if quantize else x.double().numpy()) @ seen.double().numpy().T
        )
        # Blocks of 8 bits: a weight is off by at most half a step, a 254th of the largest of its block.
        step = 0.5 / 127 * weight.abs().max() if quantize and given is weight else 0.0
        reach = x.abs().sum(1, keepdim=True).double().numpy() * 1.02
        assert (error <= reach * (float(step) * 1.01 + 2e-6 * float(weight.abs().max()))).all()


def test_a_matrix_of_several_parts_has_the_bits_of_each() -> None:
    """Six of them: more than one stage has room for."""
    names = ["q4_k", "f16", "q6_k", "q4_k", "bf16", "q3_k"]
    parts = [stored(name, outs, INPUTS) for name, outs in zip(names, (24, 7, 16, 1, 33, 5), strict=True)]
    bias, x = random(86, seed=4), random(5, INPUTS, seed=1)
    for body in (FIRST, *OTHERS):
        kernels = kernels_of(body)
        whole = kernels.linear(x, matrix_of(*parts))
        assert same_bits(whole, torch.cat([kernels.linear(x, matrix_of(part)) for part in parts], dim=1))
        before = random(5, 86, seed=6)
        assert same_bits(kernels.linear(x, matrix_of(*parts, bias=bias)), whole + bias)
        assert same_bits(kernels.add_linear(x, matrix_of(*parts, bias=bias), before), whole + bias + before)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_its_parts(activation: Activation) -> None:
    kernels = kernels_of(FIRST)
    for width, bias in ((16, None), (20, random(40)), (88, random(176))):
        matrix, x = kernels.matrix(random(2 * width, 72), bias), random(5, 72)
        apart = (kernels.silu_mul if activation == "silu" else kernels.gelu_mul)(kernels.linear(x, matrix))
        found = kernels.gated_linear(x, matrix, activation=activation)
        assert same_bits(found, apart)
        assert same_bits(kernels.gated_linear(x[3:4], matrix, activation=activation), apart[3:4])
        gate = kernels.matrix(random(width, 72, seed=3), None)
        both = torch.cat([kernels.linear(x, gate), found], dim=1)
        assert same_bits(kernels.gate_linear(x, gate, found), kernels.gelu_mul(both))


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q4_k", "iq4_xs", "mxfp4"])
def test_what_is_no_number_stays_in_its_row(name: str) -> None:
    matrix, x = matrix_of(stored(name, OUTS, INPUTS)), random(9, INPUTS, seed=1)
    clean = kernels_of(FIRST).linear(x, matrix)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[4, 100] = bad
        for body in (FIRST, *OTHERS):
            out = kernels_of(body).linear(spoiled, matrix)
            good = torch.arange(9) != 4
            assert same_bits(out[good], clean[good])
            assert not out[4].isfinite().any(), f"{body.name}: {bad} was lost"


def test_weights_beyond_the_last_output_are_never_written() -> None:
    """Columns beside a matrix's own belong to others."""
    kernels, x = kernels_of(FIRST), random(3, 64)
    for outs in (1, 15, 17, 31):
        matrix, room = kernels.matrix(random(outs, 64), None), torch.full((3, outs + 20), 7.0)
        assert isinstance(matrix, TiledMatrix)
        kernels._multiply(x, matrix, room[:, :outs], None)
        kernels._done()
        assert (room[:, outs:] == 7.0).all() and same_bits(room[:, :outs].contiguous(), kernels.linear(x, matrix))


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    matrix, x = matrix_of(stored("q4_k", 900, INPUTS), stored("f16", 300, INPUTS)), random(70, INPUTS, seed=1)
    wanted, several = kernels_of(FIRST).linear(x, matrix), kernels_of(FIRST, threads=threads)
    for allowed in range(1, threads + 1):
        several.library.threads.allowed = allowed
        assert same_bits(several.linear(x, matrix), wanted)


@pytest.mark.parametrize("width", [1, 31, 32, 50, 512])
def test_activations_are_rounded_as_numpy_would(width: int) -> None:
    x = torch.cat([random(4, width, seed=2), cancelling_rows(2, width), torch.zeros(1, width)])
    x[1] = x[1].round() / 2  # ties go to the even number
    codes, delta = rounded(x.numpy())
    sums = -codes.astype(np.int32).reshape(len(x), -1, 2, 16).sum(axis=3)
    for body in (FIRST, *OTHERS):
        kernels = kernels_of(body)
        place = kernels._records(x)
        (room,) = (each for each in kernels._rows if each.dtype == np.uint8)
        start = place.address - room.ctypes.data
        records = room[start : start + len(x) * place.stride].reshape(*delta.shape, RECORD).copy()
        kernels._done()

        def field(at: int, kind: type, records: np.ndarray = records) -> np.ndarray:
            return np.ascontiguousarray(records[:, :, at : at + 4]).view(kind)[:, :, 0]

        assert np.array_equal(records[:, :, :32].view(np.int8), codes)
        assert np.array_equal(field(DELTA, np.float32), delta)
        assert np.array_equal(field(SUM, np.int32), sums.sum(axis=2))
        assert np.array_equal(field(SUM_SCALED, np.float32), sums.sum(axis=2).astype(np.float32) * delta)
        for half in range(2):
            assert np.array_equal(field(HALF_SUM[half], np.int32), sums[:, :, half])
            assert np.array_equal(field(HALF_SUM_SCALED[half], np.float32), sums[:, :, half].astype(np.float32) * delta)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if name in LAYOUTS])
def test_compiled_loops_repack_as_numpy_does(name: str) -> None:
    """Rows in any order, from bytes that begin anywhere, by several threads."""
    part = stored(name, OUTS + 3, INPUTS)
    raw = np.zeros((len(part.raw), part.raw.shape[1] + 5), np.uint8)
    raw[:, 3:-2] = part.raw
    order = np.random.default_rng(0).permutation(OUTS + 3)
    for each in (part, replace(part, raw=raw[:, 3:-2], row_map=order), part[5:16]):
        for body in (FIRST, OTHERS[-1]):
            (found,) = kernels_of(body, threads=2).matrix(Parts((each,)), None).parts
            wanted = packed(each)
            assert found.format == wanted.format and np.array_equal(found.data, wanted.data), body.name


def test_floats_that_bfloat16_holds_take_half_the_room() -> None:
    kernels, weight, x = kernels_of(FIRST, quantize=False), random(40, 64).bfloat16().float(), random(5, 64, seed=1)
    small, whole = kernels.matrix(weight, None), kernels.matrix(weight + 2**-20, None)
    assert small.bytes * 2 == whole.bytes and small.exact and whole.exact
    (part,) = small.parts
    assert part.kind == "bfloat"
    exact = tiled([pack_floats(weight.numpy(), TileMemory())], None, (40, 64))
    assert same_bits(kernels.linear(x, small), kernels.linear(x, exact))


def test_tiles_take_no_more_room_than_the_format_does() -> None:
    for name in ("q4_0", "q6_k", "q8_0", "mlx4_64", "f16"):
        part = stored(name, 64, INPUTS)
        assert packed(part).data.nbytes <= part.nbytes * 1.1
