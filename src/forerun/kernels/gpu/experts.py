"""A mixture of experts: which ones a row goes to, and their gated networks.

Every program works on one row, in tiles whose size the model's shape alone decides, so a row's bits are its own.
Experts that no row goes to are not read: with few rows, reading is what takes the time.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.gpu.gelu import gelu_exponent, gelu_gate
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.norms import silu_mul
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import Activation

# Columns of a program, inputs of one step of its products, and its warps. All steps are written out one behind another,
# so that a program asks for everything it will read before it has the first of it.
OUTPUTS_IN, STEP_IN, WARPS_IN = 2, 1024, 2
OUTPUTS_OUT, STEP_OUT, WARPS_OUT = 1, 256, 8
MANY = 32  # rows of a prefill chunk that share experts often enough


def aligned(x: Tensor) -> Tensor:
    """Rows one after another from an address that any load may start at: Triton compiles other code for others."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@on_its_device
def route(logits: Tensor, top: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `top` largest of each row in ascending order of their ids, and their softmax, times the experts' `scale`.

    Ties go to the lower id: ids [rows, top] int64, weights float32.
    """
    rows, experts = logits.shape
    assert top <= experts and logits.stride(1) == 1
    ids = torch.empty(rows, top, dtype=torch.long, device=logits.device)
    weights = torch.empty(rows, top, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(rows,)](
        logits,
        scale,
        ids,
        weights,
        logits.stride(0),
        EXPERTS=experts,
        TOP=top,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4,
        launch_pdl=overlaps(logits.device),
    )
    return ids, weights


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def _route(logits, scale, ids, weights, stride, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    inside = number < EXPERTS
    score = tl.load(logits + row * stride + number, mask=inside, other=float("-inf")).to(tl.float32)
    # Scores as integers of the same order, behind them their numbers from the last to the first: one maximum finds the
    # best and, among equals, the first. Zeros have one sign; what is not a number is above or below all others.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - number).to(tl.int64)
    chosen = number < 0
    for _ in range(TOP):
        best = tl.max(tl.where(inside & (chosen == 0), rank, -0x7FFFFFFFFFFFFFFF - 1), axis=0)
        chosen = chosen | (inside & (rank == best))
    weight = tl.where(chosen, tl.exp(score - tl.max(tl.where(chosen, score, float("-inf")), axis=0)), 0.0)
    place = row * TOP + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(ids + place, number.to(tl.int64), mask=chosen)
    share = weight / tl.sum(weight, axis=0)
    if scale is not None:
        share = share * tl.load(scale + number, mask=inside, other=0.0)
    tl.store(weights + place, share, mask=chosen)


def can_group(x: Tensor, down: Tensor) -> bool:
    """Are there many rows, in a format and of sizes that torch's product of groups takes without asking the host?"""
    whole = all(size * x.element_size() % 16 == 0 for size in down.shape[1:])
    return len(x) >= MANY and whole and groups_natively(x.device, x.dtype)


@cache
def groups_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Elsewhere torch reads the groups on the host, which a graph cannot, and multiplies them one by one."""
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


@on_its_device
def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """As `experts` up to rounding, for a prefill chunk: the rows of an expert together, so that it is read once."""
    rows, top = ids.shape
    chosen, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # of each expert's rows
    inner = F.grouped_mm(x[order // top], gate_up.mT, offs=ends)
    inner = silu_mul(inner) if activation == "silu" else gelu_gate(*inner.chunk(2, dim=1))
    parts = torch.empty(rows * top, x.shape[1], dtype=x.dtype, device=x.device)
    parts[order] = F.grouped_mm(inner, down.mT, offs=ends)
    return (parts.view(rows, top, -1).float() * weights[..., None]).sum(1).to(x.dtype)


@on_its_device
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """Σ weight · expert(row) over the experts of each row, whose ids come in ascending order: [rows, hidden].

    gate_up [experts, 2 · inner, hidden], gate first; down [experts, hidden, inner].
    """
    x, ids, weights = aligned(x), aligned(ids), aligned(weights)
    (rows, top), (hidden, inner) = ids.shape, down.shape[1:]
    assert gate_up.is_contiguous() and down.is_contiguous() and gate_up.shape[1:] == (2 * inner, hidden)
    between = torch.empty(rows * top, inner, dtype=x.dtype, device=x.device)
    out, early = torch.empty_like(x), overlaps(x.device)
    gelu = activation == "gelu_tanh"
    step = min(STEP_IN, triton.next_power_of_2(hidden))
    _enter[(rows * top, triton.cdiv(inner, OUTPUTS_IN))](
        x, ids, gate_up, between, hidden, inner, top, OUTPUTS_IN, step, gelu, num_warps=WARPS_IN, launch_pdl=early
    )
    sizes = (hidden, inner, top, triton.next_power_of_2(top), OUTPUTS_OUT, min(STEP_OUT, triton.next_power_of_2(inner)))
    _leave[(rows, triton.cdiv(hidden, OUTPUTS_OUT))](
        between, ids, weights, down, out, *sizes, num_warps=WARPS_OUT, launch_pdl=early
    )
    return out


@triton.jit
def _enter(
    x,
    ids,
    gate_up,
    between,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GELU: tl.constexpr,
):
    """silu(gate) · up, or gelu(gate) · up, of a few inner columns of one row and one of its experts.

    between [rows · top, inner].
    """
    after_previous()
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    source = tl.arange(0, INPUTS)
    expert = tl.load(ids + pair).to(tl.int64)
    gates = gate_up + (expert * (2 * INNER) + column[:, None]) * HIDDEN + source[None, :]
    here = x + pair // TOP * HIDDEN + source
    # Sums are kept apart to the end, for there is nothing to wait for then.
    gate = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    up = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in tl.static_range(0, HIDDEN, INPUTS):
        inside = start + source < HIDDEN
        wanted = (column < INNER)[:, None] & inside[None, :]
        row = tl.load(here + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + start, mask=wanted, other=0.0).to(tl.float32) * row
        up += tl.load(gates + INNER * HIDDEN + start, mask=wanted, other=0.0).to(tl.float32) * row
    kind = between.dtype.element_ty
    opened = tl.sum(gate, axis=1).to(kind).to(tl.float32)  # rounded as a product of its own
    steep = gelu_exponent(opened) if GELU else opened
    answer = opened / (1.0 + tl.exp(-steep)) * tl.sum(up, axis=1).to(kind).to(tl.float32)
    tl.store(between + pair * INNER + column, answer.to(kind), mask=column < INNER)


@triton.jit
def _leave(
    between,
    ids,
    weights,
    down,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    TURNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A few columns of one row: its experts' answers, weighted and added.

    All experts at once, so that one wait for memory does for them all; every row's sums have the same tree. TURNS is
    TOP rounded up to a power of two.
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    source = tl.arange(0, INPUTS)[None, None, :]
    turn = tl.arange(0, TURNS)
    pair = row * TOP + turn
    expert = tl.load(ids + pair, mask=turn < TOP, other=0).to(tl.int64)
    weight = tl.load(weights + pair, mask=turn < TOP, other=0.0)
    matrix = down + (expert[None, :, None] * HIDDEN + column[:, None, None]) * INNER + source
    answer = between + pair[None, :, None] * INNER + source
    kind = out.dtype.element_ty
    part = tl.zeros((OUTPUTS, TURNS, INPUTS), tl.float32)
    for start in tl.static_range(0, INNER, INPUTS):
        inside = (start + source < INNER) & (turn < TOP)[None, :, None]
        wanted = inside & (column < HIDDEN)[:, None, None]
        inner = tl.load(answer + start, mask=inside, other=0.0).to(tl.float32)
        part += tl.load(matrix + start, mask=wanted, other=0.0).to(tl.float32) * inner
    said = tl.sum(part, axis=2).to(kind).to(tl.float32) * weight[None, :]  # [outputs, turns]
    tl.store(out + row * HIDDEN + column, tl.sum(said, axis=1).to(kind), mask=column < HIDDEN)
