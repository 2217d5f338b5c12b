"""The decoder shared by llama, mistral, qwen2 and qwen3."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Output, Pass
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

PACKERS = 2  # packing a matrix runs on one core


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


class Decoder:
    """Pre-norm blocks of attention and a gated feed-forward layer."""

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.config, self.kernels, self.device, self.dtype = config, kernels, device, dtype
        self.rope = Rope(config.rope, config.layout.size, device)
        loader = Loader(config, kernels, checkpoint, device, dtype)
        self.embedding = checkpoint.take("model.embed_tokens.weight", (config.vocab, config.hidden)).to(device)
        self.layers = []
        with progress.task("loading weights", config.layers + 1) as task, ThreadPoolExecutor(PACKERS) as packers:
            for layer in packers.map(loader.layer, range(config.layers)):
                self.layers.append(layer)
                task.advance()
            self.norm = loader.vector("model.norm.weight", config.hidden)
            head = self.embedding if config.tied else None
            if head is None:
                head = checkpoint.take("lm_head.weight", (config.vocab, config.hidden)).to(device)
            self.head = kernels.matrix(head.to(dtype), None)
            task.advance()
        checkpoint.finish(lambda name: unused(name, config.tied))

    @property
    def weight_bytes(self) -> int:
        """Bytes held by matrices and the embedding table."""
        total = self.head.bytes + self.embedding.numel() * self.embedding.element_size()
        for layer in self.layers:
            total += sum(matrix.bytes for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return total

    def matrices(self) -> list[Matrix]:
        """One matrix of every shape that a pass multiplies with; the exactness probe tries each."""
        layer = self.layers[0]
        return [layer.qkv, layer.output, layer.gate_up, layer.down, self.head]

    def forward(self, batch: Pass) -> Output:
        """Run all rows; keys and values of every row are written to its sequence's pages."""
        kernels, config = self.kernels, self.config
        cos, sin = self.rope.at(batch.positions, batch.highest)
        x = self.embedding[batch.tokens].to(self.dtype)  # [rows, hidden]
        for index, layer in enumerate(self.layers):
            normed = kernels.rms_norm(x, layer.input_norm, config.eps)
            x = x + self._attention(normed, layer, index, batch, cos, sin)
            normed = kernels.rms_norm(x, layer.post_norm, config.eps)
            inner = kernels.silu_mul(kernels.linear(normed, layer.gate_up, batch.prefill))
            x = x + kernels.linear(inner, layer.down, batch.prefill)
        hidden = kernels.rms_norm(x, self.norm, config.eps)
        wanted = hidden if batch.wanted is None else hidden[batch.wanted]
        # The few rows that get logits always go through the routine of decoding: a prefill's last row is one row.
        return Output(kernels.linear(wanted, self.head, prefill=False).float(), hidden)

    def _attention(self, x: Tensor, layer: Layer, index: int, batch: Pass, cos: Tensor, sin: Tensor) -> Tensor:
        kernels, layout = self.kernels, self.config.layout
        qkv = kernels.linear(x, layer.qkv, batch.prefill)  # [rows, (heads + 2 · kv heads) · size]
        if layer.query_norm is not None and layer.key_norm is not None:
            kernels.head_norm(qkv, 0, layout.heads, layer.query_norm, self.config.eps)
            kernels.head_norm(qkv, layout.key_column, layout.kv_heads, layer.key_norm, self.config.eps)
        kernels.rotate(qkv, 0, layout.heads + layout.kv_heads, layout.size, cos, sin)
        pages = batch.pages[index]
        kernels.store(qkv, layout, batch.spans, pages)
        out = kernels.attention(qkv, layout, batch.spans, pages, layer.window, batch.prefill)
        return kernels.linear(out, layer.output, batch.prefill)


def unused(name: str, tied: bool) -> bool:
    """Tensors a checkpoint may carry that this decoder does not need."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


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
        weights, biases = [], []
        for name, out in zip(names, outs, strict=True):
            weights.append(self.checkpoint.take(f"{prefix}{name}.weight", (out, width)).to(self.device, self.dtype))
            if bias:
                biases.append(self.checkpoint.take(f"{prefix}{name}.bias", (out,)).to(self.device, self.dtype))
        return self.kernels.matrix(torch.cat(weights), torch.cat(biases) if bias else None)

    def layer(self, index: int) -> Layer:
        """All weights of block `index`."""
        config, layout, prefix = self.config, self.config.layout, f"model.layers.{index}."
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
            window=config.windows[index],
        )
