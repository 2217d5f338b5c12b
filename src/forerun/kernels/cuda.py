"""Bodies for NVIDIA GPUs: Triton kernels whose sums have one order.

Rows belong where `RowTables` says. Nothing here reads device memory on the host, so that a pass can be captured as a
graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.composed import TorchRows
from forerun.kernels.gpu import added_norms, gelu, norms, recurrent
from forerun.kernels.gpu import attention as attend
from forerun.kernels.gpu import experts as mixture
from forerun.kernels.gpu.clusters import cluster_logits
from forerun.kernels.gpu.layer_inputs import layer_inputs
from forerun.kernels.gpu.linear import ProductLauncher
from forerun.kernels.gpu.rotate_and_store import rotate_and_store
from forerun.kernels.interface import (
    Activation,
    Angles,
    AttentionSpec,
    Decay,
    DeltaLayout,
    DeviceLayer,
    Expert,
    Experts,
    HeadLayout,
    HeadNorms,
    LayerPages,
    PassRows,
    Stacked,
)
from forerun.kernels.matrix import FloatMatrix, Matrix, Table, Weight, as_tensor


class CudaKernels(TorchRows):
    """Weights in floating point."""

    name = "cuda"
    joins_gates = True

    # Operations that are one launch.
    rms_norm = staticmethod(norms.rms_norm)
    silu_mul = staticmethod(norms.silu_mul)
    sigmoid_gate = staticmethod(norms.sigmoid_gate)
    gated_norm = staticmethod(norms.gated_norm)
    add_norm = staticmethod(added_norms.add_norm)
    route = staticmethod(mixture.route)
    cluster_logits = staticmethod(cluster_logits)

    def __init__(self, device: torch.device) -> None:
        self.products = ProductLauncher(device)
        self.device = device
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)  # of attention

    def embed(self, tokens: Tensor, table: Table) -> Tensor:
        return norms.embed(tokens, as_tensor(table))

    def layer_inputs(
        self, seen: Tensor, scale: float, norm: Tensor, eps: float, tokens: Tensor, table: Table, table_scale: float
    ) -> Tensor:
        return layer_inputs(seen, scale, norm, eps, tokens, as_tensor(table), table_scale)

    def matrix(self, weight: Weight, bias: Tensor | None) -> Matrix:
        return self.float_matrix(as_tensor(weight), bias)

    def float_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        return FloatMatrix(weight.contiguous(), None if bias is None else bias.contiguous())

    def draft_matrix(self, weight: Tensor) -> Matrix:
        return self.float_matrix(weight, None)

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        return self.products(x, weight_of(matrix))

    def add_linear(self, x: Tensor, matrix: Matrix, before: Tensor) -> Tensor:
        return self.products(x, weight_of(matrix), residual=before)

    def gated_linear(
        self,
        x: Tensor,
        matrix: Matrix,
        activation: Activation = "silu",
    ) -> Tensor:
        return self.products(x, weight_of(matrix), gated=True, gelu=activation == "gelu_tanh")

    def logits(self, x: Tensor, matrix: Matrix, cap: float = 0.0) -> Tensor:
        return self.products(x, weight_of(matrix), dtype=torch.float32, cap=cap)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return gelu.gelu_gate(*gate_up.chunk(2, dim=1))

    def gate_linear(self, x: Tensor, matrix: Matrix, own: Tensor) -> Tensor:
        return self.products(x, weight_of(matrix), gates=own)

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        rows: PassRows,
        layer: LayerPages,
        angles: Angles,
        norms: HeadNorms | None,
    ) -> None:
        queries, keys, eps, values = None, None, 0.0, None
        if norms is not None:
            queries, keys, eps, values = norms.queries, norms.keys, norms.eps, norms.values
        turns = angles.cos, angles.sin
        rotate_and_store(qkv, layout, rows, layer, *turns, queries, keys, eps, values, by_row=angles.by_row)

    def attention(self, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
        return attend.attention(qkv, spec, rows, layer, self.counters)

    def recurrence(
        self,
        x: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        rows: PassRows,
        layer: int,
        convolution: Tensor,
        decay: Decay,
    ) -> Tensor:
        state = rows.states[layer]
        assert isinstance(state, DeviceLayer)
        return recurrent.recurrence(x, gates, layout, rows, state, convolution, decay)

    def pack_experts(self, experts: list[Expert]) -> Experts:
        gate_up = torch.stack([weight_of(expert.gate_up).weight for expert in experts])
        return Stacked(gate_up, torch.stack([weight_of(expert.down).weight for expert in experts]))

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        activation: Activation = "silu",
    ) -> Tensor:
        assert isinstance(experts, Stacked)
        return mixture.experts(x, ids, weights, experts.gate_up, experts.down, activation)


def weight_of(matrix: Matrix) -> FloatMatrix:
    """All weights are in floating point here."""
    assert isinstance(matrix, FloatMatrix)
    return matrix
