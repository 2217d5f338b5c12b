"""The slow, obvious bodies in plain torch: one row at a time, so that no row can depend on another.

They are the oracle for the fast bodies and serve on devices that have none of their own yet.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.interface import Angles, AttentionSpec, HeadLayout, HeadNorms, LayerPages, PassRows
from forerun.kernels.matrix import (
    FloatMatrix,
    Matrix,
    Weight,
    as_tensor,
)
from forerun.kernels.reference_recurrent import RecurrentReference


class ReferenceKernels(RecurrentReference):
    """Plain torch on any device."""

    name = "reference"

    def matrix(self, weight: Weight, bias: Tensor | None) -> FloatMatrix:
        return self.float_matrix(as_tensor(weight), bias)

    def float_matrix(self, weight: Tensor, bias: Tensor | None) -> FloatMatrix:
        return FloatMatrix(weight, bias)

    def draft_matrix(self, weight: Tensor) -> FloatMatrix:
        return self.float_matrix(weight, None)

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        assert isinstance(matrix, FloatMatrix)
        return torch.cat([F.linear(row, matrix.weight, matrix.bias) for row in x.split(1)])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.cat([self._norm_row(row, weight, eps) for row in x.split(1)]) if len(x) else x

    def _norm_row(self, row: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = row.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(row.dtype)

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        rows: PassRows,
        layer: LayerPages,
        angles: Angles,
        norms: HeadNorms | None,
    ) -> None:
        if norms is not None:
            self.head_norm(qkv, 0, layout.heads, norms.queries, norms.eps)
            if layout.kv_heads:
                self.head_norm(qkv, layout.key_column, layout.kv_heads, norms.keys, norms.eps)
            if layout.kv_heads and norms.values is not None:
                self.head_norm(qkv, layout.value_column, layout.kv_heads, norms.values, norms.eps)
        self.rotate(qkv, 0, layout.heads + layout.kv_heads, layout.size, rows, angles)
        if layout.kv_heads:
            self.store(qkv, layout, rows, layer)

    def head_norm(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        part = x[:, first : first + heads * len(weight)]
        for row in part.split(1):
            row.copy_(self._norm_row(row.unflatten(1, (heads, len(weight))), weight, eps).flatten(1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows = []
        for row in gate_up.split(1):
            gate, up = row.float().chunk(2, dim=1)
            rows.append((F.silu(gate) * up).to(gate_up.dtype))
        return torch.cat(rows)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        rows = [row.float().chunk(2, dim=1) for row in gate_up.split(1)]
        return torch.cat([F.gelu(gate, approximate="tanh") * up for gate, up in rows]).to(gate_up.dtype)

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        return torch.cat([cap * (row / cap).tanh() for row in logits.split(1)])

    def rotate(self, x: Tensor, first: int, heads: int, size: int, rows: PassRows, angles: Angles) -> None:
        at = torch.arange(len(x), device=x.device)
        if not angles.by_row:
            at = torch.cat([rows.position[s] + torch.arange(n, device=x.device) for s, _, n in rows.spans()])
        cos, sin = angles.cos[at][:, None], angles.sin[at][:, None]
        half = cos.shape[2]
        part = x[:, first : first + heads * size].unflatten(1, (heads, size))  # [rows, heads, size]
        left, right = part[..., :half].float(), part[..., half : 2 * half].float()
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        part[..., : 2 * half] = turned.to(x.dtype)

    def store(self, qkv: Tensor, layout: HeadLayout, rows: PassRows, layer: LayerPages) -> None:
        page = layer.values.shape[2]
        keys = qkv[:, layout.key_column : layout.value_column].unflatten(1, (layout.kv_heads, layout.size))
        values = qkv[:, layout.value_column : layout.width].unflatten(1, (layout.kv_heads, layout.size))
        for sequence, start, count in rows.spans():
            at = rows.position[sequence] + torch.arange(count, device=qkv.device)
            pages, slots = rows.table(layer)[sequence, at // page].long(), at % page
            layer.keys[pages, :, :, slots] = keys[start : start + count]
            layer.values[pages, :, slots] = values[start : start + count]

    def attention(self, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
        out = torch.zeros(len(qkv), spec.layout.key_column, dtype=qkv.dtype, device=qkv.device)
        together = rows.together if spec.window else None
        for sequence, start, count in rows.spans():
            table, position = rows.table(layer)[sequence], int(rows.position[sequence])
            earliest = 0 if rows.first is None else int(rows.first[sequence])
            for row in range(start, start + count):
                at = last = position + row - start
                first = max(earliest, at + 1 - spec.window) if spec.window else earliest
                if together is not None and together[row] >= 0:  # a picture sees its later rows too
                    mine = (together[start : start + count] == together[row]).nonzero()[:, 0] + position
                    last = int(mine[-1])
                keys, values = gather(table, layer, last + 1)
                out[row] = self._attend_row(qkv[row], spec, keys[:, first:], values[:, first:])
        return out

    def _attend_row(self, row: Tensor, spec: AttentionSpec, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [kv heads, keys, size] that the row sees."""
        layout = spec.layout
        queries = row[: layout.key_column].view(len(keys), -1, layout.size).float()  # [kv heads, group, size]
        scores = queries @ keys.float().transpose(1, 2) * spec.factor
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        out: Tensor = (scores.softmax(-1) @ values.float()).flatten().to(row.dtype)
        return out


def gather(table: Tensor, layer: LayerPages, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of the sequence of a block table [pages], from page `first` on: each [kv heads, keys, size].

    Of its first `length` keys, those of pages before `first` are left out.
    """
    page = layer.values.shape[2]
    used = table[first : -(-length // page)].long()
    keys = layer.keys[used].permute(1, 0, 3, 2).flatten(1, 2)  # [kv heads, pages · page, size]
    values = layer.values[used].permute(1, 0, 2, 3).flatten(1, 2)
    return keys[:, : length - first * page], values[:, : length - first * page]
