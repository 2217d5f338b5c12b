"""CPU bodies: integer products from fbgemm (or our own loop), everything between them compiled by numba."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels import compiled, compiled_activations
from forerun.kernels.cpu_recurrent import RecurrentCpu
from forerun.kernels.interface import Activation, Angles, AttentionSpec, HeadLayout, LayerPages, PassRows
from forerun.kernels.matrix import FloatMatrix, IntMatrix, Matrix, Weight, round_to_int8
from forerun.kernels.prefill import prefill_attention

fbgemm_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op  # skips a slow wrapper
ZERO_POINT = 64  # moves digits from −64…64 to the unsigned bytes fbgemm multiplies


class CpuKernels(RecurrentCpu):
    """float32 activations; weights in float32 or, with `quantize`, in 8 bits."""

    def __init__(self, quantize: bool) -> None:
        self.quantize = quantize
        self.fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        if quantize and self.fbgemm:
            with warnings.catch_warnings():
                # torch announces, once, that a constructor will go; constraints.txt pins versions that have it. It is
                # heard out here, before several threads pack: filters of warnings belong to the whole process.
                warnings.simplefilter("ignore", UserWarning)
                pack_for_fbgemm(torch.zeros(1, 1, dtype=torch.int8))
        self.name = ("cpu, int8 (fbgemm)" if self.fbgemm else "cpu, int8 (own loop)") if quantize else "cpu, float32"

    def matrix(self, weight: Weight, bias: Tensor | None) -> Matrix:
        if not self.quantize:
            return self.float_matrix(weight.float(), bias)
        bias = None if bias is None else bias.float().contiguous()
        values, scale = round_to_int8(weight)
        shape = (values.shape[0], values.shape[1])
        if self.fbgemm:
            return IntMatrix(None, scale, bias, shape, pack_for_fbgemm(values))
        return IntMatrix(values, scale, bias, shape)

    def float_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        return FloatMatrix(weight.float().contiguous(), None if bias is None else bias.float().contiguous())

    def linear(self, x: Tensor, matrix: Matrix, prefill: bool) -> Tensor:
        if isinstance(matrix, FloatMatrix):
            return self._float_linear(x, matrix, prefill)
        product, scale = self._digit_product(x, matrix)
        out = torch.empty(len(x), matrix.shape[0])
        compiled.join_digits(product.numpy(), scale, matrix.scale.numpy(), out.numpy())
        return self._with_bias(out, matrix)

    def gated_linear(self, x: Tensor, matrix: Matrix, prefill: bool, activation: Activation = "silu") -> Tensor:
        if isinstance(matrix, FloatMatrix) or matrix.bias is not None or activation != "silu":
            return super().gated_linear(x, matrix, prefill, activation)
        product, scale = self._digit_product(x, matrix)
        out = torch.empty(len(x), matrix.shape[0] // 2)
        compiled.join_gated(product.numpy(), scale, matrix.scale.numpy(), out.numpy())
        return out

    def _digit_product(self, x: Tensor, matrix: IntMatrix) -> tuple[Tensor, Any]:
        """Products of the high and the low digits of all rows [2 · rows, out], and the rows' scales."""
        digits = torch.empty(2 * len(x), matrix.shape[1])
        scale = np.empty(len(x), np.float32)
        compiled.split_digits(x.numpy(), digits.numpy(), scale)
        if matrix.packed is not None:
            return fbgemm_product(digits, 1.0, ZERO_POINT, matrix.packed), scale
        assert matrix.values is not None
        product = torch.empty(2 * len(x), matrix.shape[0])
        compiled.int_product(digits.to(torch.int16).numpy(), matrix.values.numpy(), product.numpy())
        return product, scale

    def _float_linear(self, x: Tensor, matrix: FloatMatrix, prefill: bool) -> Tensor:
        if prefill:
            return F.linear(x, matrix.weight, matrix.bias)
        if self.quantize:
            # The few matrices that are never quantised are small: one row at a time, on the threads that are awake.
            return torch.cat([F.linear(row, matrix.weight, matrix.bias) for row in x.split(1)])
        out = torch.empty(len(x), matrix.shape[0])
        compiled.float_product(x.numpy(), matrix.weight.numpy(), out.numpy())
        return self._with_bias(out, matrix)

    def _with_bias(self, out: Tensor, matrix: Matrix) -> Tensor:
        if matrix.bias is not None:
            compiled.add_columns(out.numpy(), matrix.bias.numpy())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        compiled.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def head_norm(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        compiled.head_norm(x.numpy(), first, heads, weight.numpy(), np.float32(eps))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        compiled.silu_mul(gate_up.numpy(), out.numpy())
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        compiled_activations.gelu_mul(gate_up.numpy(), out.numpy())
        return out

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        compiled_activations.soft_cap(logits.numpy(), np.float32(cap))
        return logits

    def rotate(self, x: Tensor, first: int, heads: int, size: int, rows: PassRows, angles: Angles) -> None:
        turns = angles.cos.numpy(), angles.sin.numpy()
        compiled.rotate(x.numpy(), first, heads, size, rows.query_start.numpy(), rows.position.numpy(), *turns)

    def store(self, qkv: Tensor, layout: HeadLayout, rows: PassRows, layer: LayerPages) -> None:
        where = rows.query_start.numpy(), rows.position.numpy(), rows.table(layer).numpy()
        columns = layout.key_column, layout.value_column
        compiled.store(qkv.numpy(), *columns, *where, layer.keys.numpy(), layer.values.numpy())

    def attention(self, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages, prefill: bool) -> Tensor:
        if prefill:
            return prefill_attention(qkv, spec, rows, layer).contiguous()
        out = torch.empty(len(qkv), spec.layout.key_column)
        where = rows.query_start.numpy(), rows.position.numpy(), rows.table(layer).numpy()
        how = np.float32(spec.factor), spec.window, np.float32(spec.softcap)
        compiled.attend(qkv.numpy(), *where, layer.keys.numpy(), layer.values.numpy(), *how, out.numpy())
        return out


def pack_for_fbgemm(values: Tensor) -> Any:
    """int8 values [out, in] in fbgemm's own layout, scales left at one: they are applied when digits are joined."""
    ones = torch.ones(len(values), dtype=torch.double)
    zeros = torch.zeros(len(values), dtype=torch.long)
    tensor = torch._make_per_channel_quantized_tensor(values, ones, zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)
