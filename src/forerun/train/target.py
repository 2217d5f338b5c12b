"""The target as training needs it: large batches in plain torch, its depths tapped, keys and values in static blocks.

Decoding for users runs elsewhere and row by row with fixed bits; here only throughput counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.matrix import as_tensor
from forerun.models.families import TRAINABLE, read_config
from forerun.models.layers.config import AttentionConfig, DenseConfig
from forerun.models.layers.decoder import has_own_output, unused
from forerun.models.layers.rope import Rope
from forerun.weights.checkpoint import Checkpoint, open_checkpoint


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer under their short Hugging Face names (`self_attn.q_proj.weight` ...)."""

    weights: dict[str, Tensor]
    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor


@dataclass(slots=True)
class StaticCache:
    """Keys and values of a batch, [rows, kv heads, length, size] per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        for store in (self.keys, self.values):
            for index, tensor in enumerate(store):
                store[index] = tensor[rows]


class FrozenTarget:
    """A frozen decoder of the llama family."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        family = str(checkpoint.config.get("model_type"))
        if family not in TRAINABLE:
            known = ", ".join(TRAINABLE)
            raise ForerunError(f"a head cannot be trained for model type {family!r} yet; only for {known}")
        self.checkpoint = checkpoint
        self.config = read_config(checkpoint.reader)
        mixer, feed_forward = self.config.layers[0].mixer, self.config.layers[0].feed_forward
        assert isinstance(mixer, AttentionConfig) and isinstance(feed_forward, DenseConfig)
        self.attention, self.feed_forward = mixer, feed_forward  # of all layers, but for the window
        self.windows = [spec.window for spec in self.config.attention]  # of each layer; 0: it sees everything before
        self.device, self.dtype = device, dtype
        hidden, vocab = self.config.hidden, self.config.vocab
        self.rope = Rope(self.attention.rope, device)
        self.embedding = self._take("model.embed_tokens.weight", (vocab, hidden))
        tied = self.config.tied and not has_own_output(checkpoint, "model.embed_tokens.weight")
        self.config = replace(self.config, tied=tied)
        self.output = self.embedding if tied else self._take("lm_head.weight", (vocab, hidden))
        # Rows and matrix hold bfloat16 values; the products are kept in float32, or ties would decide tokens.
        self.output_wide = self.output.float()
        self.norm = self._take("model.norm.weight", (hidden,))
        self.layers = [self._layer(index) for index in range(len(self.config.layers))]
        checkpoint.finish(lambda name: unused(name, self.config))

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return as_tensor(self.checkpoint.weight(name, shape).to(self.device, self.dtype))

    def _layer(self, index: int) -> LayerWeights:
        shapes = self.layer_shapes(self.feed_forward.inner)
        weights = {name: self._take(f"model.layers.{index}.{name}", shape) for name, shape in shapes.items()}
        parts = [weights[f"self_attn.{part}_proj.weight"] for part in "qkv"]
        biases = [weights[f"self_attn.{part}_proj.bias"] for part in "qkv"] if self.attention.qkv_bias else None
        gates = [weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]
        return LayerWeights(weights, torch.cat(parts), torch.cat(biases) if biases else None, torch.cat(gates))

    def layer_shapes(self, intermediate: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of a decoder layer and its shape, as the family has them."""
        attention, layout, hidden = self.attention, self.config.layout, self.config.hidden
        widths = {"q": layout.heads, "k": layout.kv_heads, "v": layout.kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, layout.heads * layout.size),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }
        for part, heads in widths.items():
            shapes[f"self_attn.{part}_proj.weight"] = (heads * layout.size, hidden)
            if attention.qkv_bias:
                shapes[f"self_attn.{part}_proj.bias"] = (heads * layout.size,)
        if attention.output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if self.feed_forward.bias:
            shapes |= {f"mlp.{part}_proj.bias": (intermediate,) for part in ("gate", "up")}
            shapes["mlp.down_proj.bias"] = (hidden,)
        if attention.head_norms:
            shapes |= {f"self_attn.{part}_norm.weight": (layout.size,) for part in "qk"}
        return shapes

    def new_cache(self, rows: int, length: int) -> StaticCache:
        """Room for `rows` sequences of `length` tokens."""
        shape = (rows, self.config.layout.kv_heads, length, self.config.layout.size)

        def blank() -> list[Tensor]:
            return [torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in self.layers]

        return StaticCache(blank(), blank())

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        layout = self.config.layout
        return 2 * len(self.config.layers) * layout.kv_heads * layout.size * self.dtype.itemsize

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-final-norm rows [..., hidden] to float32 logits."""
        return F.linear(hidden.float(), self.output_wide)

    def read(
        self, tokens: Tensor, taps: tuple[int, ...] = (), cache: StaticCache | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Whole sequences [rows, length], right-padded. Post-norm hidden states and the inputs of the tapped layers.

        Inputs come in the order of `taps`. Padding lies after every real token, and no row sees a later one.
        """
        rows, length = tokens.shape
        positions = torch.arange(length, device=self.device)
        cos, sin = self._angles(positions, length)
        # The kernel for plain causal attention is the fastest, so that a mask is made only where a window cuts.
        masks = {window: self._mask(positions, length, window) for window in set(self.windows) if 0 < window < length}
        x = self.embedding[tokens]
        tapped: dict[int, Tensor] = {}
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            if index in taps:
                tapped[index] = x
            query, key, value = self._project(x, layer, cos, sin)
            if cache is not None:
                cache.keys[index][:, :, :length] = key
                cache.values[index][:, :, :length] = value
            shared = self.config.layout.heads // self.config.layout.kv_heads
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
            mask = masks.get(window)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
            x = self._rest(x, mixed.transpose(1, 2).reshape(rows, length, -1), layer)
        hidden = F.rms_norm(x, (self.config.hidden,), self.norm, self.config.eps)
        return hidden, [tapped[tap] for tap in taps]

    def step(self, tokens: Tensor, positions: Tensor, cache: StaticCache, length: int) -> Tensor:
        """One token per row [rows] at its own position; all positions lie below `length`. Logits [rows, vocabulary]."""
        layout = self.config.layout
        rows = len(tokens)
        each = torch.arange(rows, device=self.device)
        cos, sin = self._angles(positions[:, None], length)
        x = self.embedding[tokens][:, None]
        masks = {window: self._mask(positions, length, window)[:, None, None] for window in set(self.windows)}
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            query, key, value = self._project(x, layer, cos[:, None], sin[:, None])
            keys, values = cache.keys[index], cache.values[index]
            keys[each, :, positions] = key[:, :, 0]
            values[each, :, positions] = value[:, :, 0]
            # Queries that share keys stand in the place of positions: no copies of keys, and one mask for all.
            grouped = query.reshape(rows, layout.kv_heads, -1, layout.size)
            keys, values = keys[:, :, :length], values[:, :, :length]
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=masks[window])
            x = self._rest(x, mixed.reshape(rows, 1, -1), layer)
        return self.logits(F.rms_norm(x[:, 0], (self.config.hidden,), self.norm, self.config.eps))

    def _mask(self, positions: Tensor, length: int, window: int) -> Tensor:
        """What hides from each position those of the first `length` keys that it does not see: [positions, length]."""
        back = positions[:, None] - torch.arange(length, device=self.device)  # how far before the position a key is
        unseen = (back < 0) | (back >= window) if window else back < 0
        return torch.zeros(unseen.shape, device=self.device, dtype=self.dtype).masked_fill_(unseen, float("-inf"))

    def _angles(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope.at(positions, highest)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _project(self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values, [rows, heads, length, size], rotated."""
        layout, eps = self.config.layout, self.config.eps
        normed = F.rms_norm(x, (self.config.hidden,), layer.weights["input_layernorm.weight"], eps)
        fused = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = fused.unflatten(-1, (-1, layout.size)).transpose(1, 2)
        query, key, value = heads.split((layout.heads, layout.kv_heads, layout.kv_heads), dim=1)
        if self.attention.head_norms:
            query = F.rms_norm(query, (layout.size,), layer.weights["self_attn.q_norm.weight"], eps)
            key = F.rms_norm(key, (layout.size,), layer.weights["self_attn.k_norm.weight"], eps)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _rest(self, x: Tensor, mixed: Tensor, layer: LayerWeights) -> Tensor:
        """Output projection and feed-forward layer, both added to the residual."""
        weights = layer.weights
        x = x + F.linear(mixed, weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        normed = F.rms_norm(x, (self.config.hidden,), weights["post_attention_layernorm.weight"], self.config.eps)
        if self.feed_forward.bias:
            gate = F.linear(normed, weights["mlp.gate_proj.weight"], weights["mlp.gate_proj.bias"])
            up = F.linear(normed, weights["mlp.up_proj.weight"], weights["mlp.up_proj.bias"])
        else:
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"], weights.get("mlp.down_proj.bias"))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., size] by angles [..., size/2]."""
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def load_target(folder: Path, device: torch.device) -> FrozenTarget:
    """The model of a folder, in bfloat16 on accelerators."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FrozenTarget(open_checkpoint(folder), device, dtype)
