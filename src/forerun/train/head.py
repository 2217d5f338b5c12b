"""The trainable head: one decoder layer that continues from the target's hidden states.

Slot s: the target's state at position s, fused from several depths, and the embedding of the token after it go
through one layer; the result, normed, is both the draft's logits for the token after that (by the target's output
matrix) and the state that the next slot starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.train.chain import fused_chain
from forerun.train.target import FrozenTarget, rotate

LAYER = "mtp.layers.0."
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Scales:
    """Sizes measured on the target, which the head's norms start from."""

    residual: float  # rms of what enters the last layer
    hidden: float  # rms of the post-final-norm hidden state


class Head:
    """Weights under the names they are saved with, in float32; computes in the dtype of its inputs."""

    def __init__(
        self,
        target: FrozenTarget,
        taps: tuple[int, ...],
        intermediate: int | None = None,
        attention: Attention = fused_chain,
    ) -> None:
        self.target, self.taps, self.attention = target, taps, attention
        self.config = target.config
        self.intermediate = intermediate or target.feed_forward.inner
        self.weights: dict[str, Tensor] = {
            name: torch.zeros(shape, device=target.device) for name, shape in self.shapes().items()
        }

    def shapes(self, intermediate: int | None = None) -> dict[str, tuple[int, ...]]:
        """Every tensor of the head, or of one with another feed-forward width."""
        hidden = self.config.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
            "mtp.norm.weight": (hidden,),
        }
        layer = self.target.layer_shapes(intermediate or self.intermediate)
        shapes |= {LAYER + name: shape for name, shape in layer.items()}
        if self.taps:
            shapes |= {f"mtp.tap_norms.{index}.weight": (hidden,) for index in range(len(self.taps) + 1)}
            shapes["mtp.fuse.weight"] = (hidden, (len(self.taps) + 1) * hidden)
        return shapes

    def start(self, scales: Scales, seed: int) -> None:
        """Start from the target: its last layer, its final norm, inputs that look like its residual."""
        generator = torch.Generator().manual_seed(seed)
        hidden = self.config.hidden
        identity = torch.eye(hidden)
        new: dict[str, Tensor] = {}
        for name, tensor in self.target.layers[-1].weights.items():
            new[LAYER + name] = self.widened(LAYER + name, tensor.float().cpu(), generator)
        final = self.target.norm.float().cpu()
        new["mtp.norm.weight"] = final
        # Undoing the final norm's gains gives back the direction of the residual.
        gains = final.abs().clamp_min(0.2 * float(final.abs().mean()))
        new["mtp.pre_fc_norm_hidden.weight"] = (scales.residual * scales.hidden / gains) * final.sign()
        new["mtp.pre_fc_norm_embedding.weight"] = torch.full((hidden,), scales.residual)
        noise = 0.02 / hidden**0.5
        new["mtp.fc.weight"] = torch.cat((0.5 * identity, identity), dim=1)
        new["mtp.fc.weight"] += noise * torch.randn(hidden, 2 * hidden, generator=generator)
        if self.taps:
            count = len(self.taps)
            for index in range(count + 1):
                new[f"mtp.tap_norms.{index}.weight"] = torch.full((hidden,), scales.hidden)
            fuse = 0.1 / hidden**0.5 * torch.randn(hidden, (count + 1) * hidden, generator=generator)
            fuse[:, count * hidden :] = identity
            new["mtp.fuse.weight"] = fuse
        self.load(new)

    def widened(self, name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """Weights of a narrower feed-forward layer with rows added: random ones, without effect at the start."""
        shape = self.shapes()[name]
        if tuple(tensor.shape) == shape:
            return tensor
        wide = torch.zeros(shape)
        if "down" not in name:
            wide = torch.randn(shape, generator=generator) * float(tensor.std())
        kept = tuple(slice(0, min(have, want)) for have, want in zip(tensor.shape, shape, strict=True))
        wide[kept] = tensor[kept]
        return wide

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take these values; gradients are collected from here on."""
        for name, shape in self.shapes().items():
            value = weights[name].detach().to(self.target.device, torch.float32, copy=True)
            assert tuple(value.shape) == shape, name
            self.weights[name] = value.requires_grad_()

    def matrices(self) -> Iterable[Tensor]:
        return (tensor for tensor in self.weights.values() if tensor.ndim == 2)

    def vectors(self) -> Iterable[Tensor]:
        return (tensor for tensor in self.weights.values() if tensor.ndim == 1)

    def unroll(self, features: Tensor, following: Tensor, steps: int, first: int = 0) -> list[Tensor]:
        """Normed outputs [rows, length - first, hidden] of every step, for all base positions from `first` on at once.

        features [rows, length, parts, hidden]: the taps and the post-norm hidden state; following [rows, length +
        steps - 1]: the token after each position. Step j of base s is the slot s + j, reached by drafting alone; its
        logits are for the token at s + j + 2. Of the positions before `first` only the true entries are made.
        """
        weights = {name: tensor.to(features.dtype) for name, tensor in self.weights.items()}
        length = features.shape[1]
        state = self._fused(features, weights)
        embedded = self.target.embedding[following]  # [rows, length + steps - 1, hidden]
        cos, sin = self.target.rope.at(torch.arange(length + steps, device=features.device), length + steps)
        cos, sin = cos.to(features.dtype), sin.to(features.dtype)
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            here = slice(step + (first if step else 0), step + length)
            x = self._joined(embedded[:, here], state, weights)
            state = self._layer(x, weights, cos[here], sin[here], keys, values, length - first)
            outputs.append(state)
        return outputs

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.eps)

    def _fused(self, features: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if not self.taps:
            return features[:, :, 0]
        normed = [
            self._norm(features[:, :, part], weights[f"mtp.tap_norms.{part}.weight"])
            for part in range(len(self.taps) + 1)
        ]
        return F.linear(torch.cat(normed, dim=-1), weights["mtp.fuse.weight"])

    def _joined(self, embedded: Tensor, state: Tensor, weights: dict[str, Tensor]) -> Tensor:
        left = self._norm(embedded, weights["mtp.pre_fc_norm_embedding.weight"])
        right = self._norm(state, weights["mtp.pre_fc_norm_hidden.weight"])
        return F.linear(torch.cat((left, right), dim=-1), weights["mtp.fc.weight"])

    def _layer(
        self,
        x: Tensor,
        weights: dict[str, Tensor],
        cos: Tensor,
        sin: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        last: int,
    ) -> Tensor:
        """Keys and values of all positions of x are added; the output is that of the last ones."""

        def project(rows: Tensor, name: str) -> Tensor:
            return F.linear(rows, weights[f"{LAYER}{name}_proj.weight"], weights.get(f"{LAYER}{name}_proj.bias"))

        layout = self.config.layout
        normed = self._norm(x, weights[LAYER + "input_layernorm.weight"])
        x = x[:, -last:]
        query, key, value = (
            project(rows, f"self_attn.{part}").unflatten(-1, (-1, layout.size)).transpose(1, 2)
            for part, rows in (("q", normed[:, -last:]), ("k", normed), ("v", normed))
        )
        if self.target.attention.head_norms:
            query = self._norm(query, weights[LAYER + "self_attn.q_norm.weight"])
            key = self._norm(key, weights[LAYER + "self_attn.k_norm.weight"])
        query, key = rotate(query, cos[-last:], sin[-last:]), rotate(key, cos, sin)
        shared = layout.heads // layout.kv_heads
        keys.append(key.repeat_interleave(shared, 1))
        values.append(value.repeat_interleave(shared, 1))
        chain_k = torch.stack(keys[1:], dim=2) if len(keys) > 1 else None
        chain_v = torch.stack(values[1:], dim=2) if len(values) > 1 else None
        mixed = self.attention(query, keys[0], values[0], chain_k, chain_v)
        x = x + project(mixed.transpose(1, 2).flatten(2), "self_attn.o")
        normed = self._norm(x, weights[LAYER + "post_attention_layernorm.weight"])
        inner = F.silu(project(normed, "mlp.gate")) * project(normed, "mlp.up")
        x = x + project(inner, "mlp.down")
        return self._norm(x, weights["mtp.norm.weight"])
