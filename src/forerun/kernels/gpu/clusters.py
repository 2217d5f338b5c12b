"""Logits of a few clusters of a vocabulary: each row reads the clusters it chose and no others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps

TOKENS = 32  # of a cluster in one program
INPUTS = 256  # of one step of a product


@triton.jit
def _cluster_logits(
    x,
    table,
    clusters,
    out,
    x_stride,
    TOP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    after_previous()
    pair = tl.program_id(0).to(tl.int64)  # a row and one of its clusters
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    source = tl.arange(0, INPUTS)
    cluster = tl.load(clusters + pair).to(tl.int64)
    lines = table + (cluster * SIZE + token[:, None]) * WIDTH + source[None, :]
    here = x + pair // TOP * x_stride + source
    total = tl.zeros((TOKENS, INPUTS), tl.float32)
    for start in range(0, WIDTH, INPUTS):
        inside = start + source < WIDTH
        row = tl.load(here + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        wanted = (token < SIZE)[:, None] & inside[None, :]
        total += tl.load(lines + start, mask=wanted, other=0.0).to(tl.float32) * row
    tl.store(out + pair * SIZE + token, tl.sum(total, axis=1), mask=token < SIZE)


@on_its_device
def cluster_logits(x: Tensor, table: Tensor, clusters: Tensor) -> Tensor:
    """x [rows, width] · table [all clusters, size, width] of each row's clusters [rows, top]: float32 [rows, …]."""
    (rows, top), (_, size, width) = clusters.shape, table.shape
    assert table.is_contiguous() and clusters.is_contiguous() and x.stride(1) == 1
    out = torch.empty(rows, top * size, dtype=torch.float32, device=x.device)
    inputs = min(INPUTS, triton.next_power_of_2(width))
    grid = rows * top, triton.cdiv(size, TOKENS)
    _cluster_logits[grid](
        x, table, clusters, out, x.stride(0), top, size, width, TOKENS, inputs, num_warps=4,
        launch_pdl=overlaps(x.device),
    )  # fmt: skip
    return out
