"""One decoder block: its weights, how they are read, how rows run through it. Decoders and draft heads share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Angles, AttentionSpec, HeadNorms, Kernels, LayerPages
from forerun.kernels.matrix import Matrix, Weight, join
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.rows import Pass
from forerun.weights.checkpoint import Checkpoint


@dataclass(slots=True)
class Layer:
    """Weights of one block, projections fused."""

    input_norm: Tensor  # [hidden]
    qkv: Matrix
    head_norms: HeadNorms | None
    output: Matrix
    post_norm: Tensor  # [hidden]
    gate_up: Matrix
    down: Matrix
    window: int


def run_layer(
    kernels: Kernels, config: DecoderConfig, layer: Layer, x: Tensor, batch: Pass, pages: LayerPages, angles: Angles
) -> Tensor:
    """[rows, hidden] → [rows, hidden]; keys and values of every row are written to its sequence's pages."""
    prefill = batch.prefill
    qkv = write_keys(kernels, config, layer, x, batch, pages, angles)
    out = kernels.attention(qkv, AttentionSpec(config.layout, layer.window), batch.rows, pages, prefill)
    x = kernels.add_linear(out, layer.output, x, prefill)
    inner = kernels.gated_linear(kernels.rms_norm(x, layer.post_norm, config.eps), layer.gate_up, prefill)
    return kernels.add_linear(inner, layer.down, x, prefill)


def write_keys(
    kernels: Kernels, config: DecoderConfig, layer: Layer, x: Tensor, batch: Pass, pages: LayerPages, angles: Angles
) -> Tensor:
    """The first part of a block, up to the keys and values in their pages: queries, keys and values [rows, …]."""
    qkv = kernels.linear(kernels.rms_norm(x, layer.input_norm, config.eps), layer.qkv, batch.prefill)
    kernels.place(qkv, config.layout, batch.rows, pages, angles, layer.head_norms)
    return qkv


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
        norms: HeadNorms | None = None
        if config.head_norms:
            queries_norm, keys_norm = (self.vector(f"{attention}{n}_norm.weight", layout.size) for n in "qk")
            norms = HeadNorms(queries_norm, keys_norm, config.eps)
        return Layer(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=self.fused(attention, ["q_proj", "k_proj", "v_proj"], [queries, keys, keys], hidden, config.qkv_bias),
            head_norms=norms,
            output=self.fused(attention, ["o_proj"], [hidden], queries, config.output_bias),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self.fused(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, config.mlp_bias),
            down=self.fused(mlp, ["down_proj"], [hidden], inner, config.mlp_bias),
            window=window,
        )
