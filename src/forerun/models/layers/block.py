"""One decoder block: its weights, how they are read, how rows run through it. Decoders and draft heads share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Kernels, LayerPages
from forerun.kernels.matrix import Matrix, Weight, join
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.rows import Pass
from forerun.weights.checkpoint import Checkpoint


@dataclass(slots=True)
class Layer:
    """Weights of one block, projections fused."""

    input_norm: Tensor  # [hidden]
    qkv: Matrix
    query_norm: Tensor | None  # [head size]
    key_norm: Tensor | None
    output: Matrix
    post_norm: Tensor  # [hidden]
    gate_up: Matrix
    down: Matrix
    window: int


def run_layer(
    kernels: Kernels,
    config: DecoderConfig,
    layer: Layer,
    x: Tensor,
    batch: Pass,
    pages: LayerPages,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """[rows, hidden] → [rows, hidden]; keys and values of every row are written to its sequence's pages."""
    normed = kernels.rms_norm(x, layer.input_norm, config.eps)
    x = x + _attention(kernels, config, layer, normed, batch, pages, cos, sin)
    normed = kernels.rms_norm(x, layer.post_norm, config.eps)
    inner = kernels.silu_mul(kernels.linear(normed, layer.gate_up, batch.prefill))
    return x + kernels.linear(inner, layer.down, batch.prefill)


def _attention(
    kernels: Kernels,
    config: DecoderConfig,
    layer: Layer,
    x: Tensor,
    batch: Pass,
    pages: LayerPages,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    layout = config.layout
    qkv = kernels.linear(x, layer.qkv, batch.prefill)  # [rows, (heads + 2 · kv heads) · size]
    if layer.query_norm is not None and layer.key_norm is not None:
        kernels.head_norm(qkv, 0, layout.heads, layer.query_norm, config.eps)
        kernels.head_norm(qkv, layout.key_column, layout.kv_heads, layer.key_norm, config.eps)
    kernels.rotate(qkv, 0, layout.heads + layout.kv_heads, layout.size, cos, sin)
    kernels.store(qkv, layout, batch.spans, pages)
    out = kernels.attention(qkv, layout, batch.spans, pages, layer.window, batch.prefill)
    return kernels.linear(out, layer.output, batch.prefill)


class Loader:
    """Takes tensors by their Hugging Face names, checks shapes, fuses projections."""

    def __init__(
        self, config: DecoderConfig, kernels: Kernels, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.kernels, self.checkpoint, self.device, self.dtype = config, kernels, checkpoint, device, dtype

    def vector(self, name: str, size: int) -> Tensor:
        """Norm weights are kept in float32: they are small and multiply float32 values."""
        return self.checkpoint.take(name, (size,)).to(self.device, torch.float32)

    def fused(self, prefix: str, names: list[str], outs: list[int], width: int, bias: bool) -> Matrix:
        """Several projections of the same input as one matrix."""
        weights: list[Weight] = []
        biases = []
        for name, out in zip(names, outs, strict=True):
            weights.append(self.checkpoint.weight(f"{prefix}{name}.weight", (out, width)).to(self.device, self.dtype))
            if bias:
                biases.append(self.checkpoint.take(f"{prefix}{name}.bias", (out,)).to(self.device, self.dtype))
        return self.kernels.matrix(join(weights), torch.cat(biases) if bias else None)

    def layer(self, prefix: str, window: int) -> Layer:
        """All weights of the block whose tensors begin with `prefix`."""
        config, layout = self.config, self.config.layout
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        queries, keys = layout.heads * layout.size, layout.kv_heads * layout.size
        hidden, inner = config.hidden, config.intermediate
        norms: list[Tensor | None] = [None, None]
        if config.head_norms:
            norms = [self.vector(f"{attention}{name}.weight", layout.size) for name in ("q_norm", "k_norm")]
        return Layer(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=self.fused(attention, ["q_proj", "k_proj", "v_proj"], [queries, keys, keys], hidden, config.qkv_bias),
            query_norm=norms[0],
            key_norm=norms[1],
            output=self.fused(attention, ["o_proj"], [hidden], queries, config.output_bias),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self.fused(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, config.mlp_bias),
            down=self.fused(mlp, ["down_proj"], [hidden], inner, config.mlp_bias),
            window=window,
        )
