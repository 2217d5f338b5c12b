"""Reads the blocks of hybrid decoders, and of their heads, from checkpoints in Hugging Face layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Decay, Expert, HeadNorms, Kernels
from forerun.kernels.matrix import Matrix, Weight, join
from forerun.models.layers.delta import AttentionMixer, DeltaMixer
from forerun.models.layers.experts import Dense, FeedForward, Sparse
from forerun.models.layers.hybrid_config import ExpertsConfig, HybridConfig
from forerun.weights.checkpoint import Checkpoint


@dataclass(slots=True)
class HybridLoader:
    """Takes tensors by name, checks shapes, fuses projections. Norms come out as the factor to multiply with."""

    config: HybridConfig
    kernels: Kernels
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A matrix that is never quantised, in the precision of activations."""
        return self.checkpoint.take(name, shape).to(self.device, self.dtype)

    def weight(self, name: str, *shape: int) -> Weight:
        """A matrix in the precision of activations, or in 8 bits when it is stored so."""
        return self.checkpoint.weight(name, shape).to(self.device, self.dtype)

    def matrix(self, *parts: Weight) -> Matrix:
        """Several projections of the same input as one matrix."""
        return self.kernels.matrix(join(list(parts)), None)

    def state_tensor(self, name: str, *shape: int) -> Tensor:
        """What decides about the state is float32, however it is stored."""
        return self.checkpoint.take(name, shape).to(self.device, torch.float32)

    def gain(self, name: str, size: int) -> Tensor:
        """A zero-centred norm: the file holds w, the factor is 1 + w."""
        return 1 + self.state_tensor(name, size)

    def attention(self, prefix: str) -> AttentionMixer:
        """`q_proj` holds the query rows and then the gate rows of each head."""
        layout, hidden = self.config.layout, self.config.hidden
        keys = layout.kv_heads * layout.size
        both = self.weight(prefix + "q_proj.weight", 2 * layout.key_column, hidden)
        queries, gates = torch.arange(2 * layout.key_column).view(layout.heads, 2, layout.size).unbind(1)
        k, v = (self.weight(f"{prefix}{name}_proj.weight", keys, hidden) for name in "kv")
        return AttentionMixer(
            layout=layout,
            project=self.matrix(both[queries.flatten()], k, v, both[gates.flatten()]),
            head_norms=HeadNorms(
                self.gain(prefix + "q_norm.weight", layout.size),
                self.gain(prefix + "k_norm.weight", layout.size),
                self.config.eps,
            ),
            output=self.matrix(self.weight(prefix + "o_proj.weight", hidden, layout.key_column)),
        )

    def delta(self, prefix: str, index: int) -> DeltaMixer:
        """`index` counts the recurrent layers."""
        layout, hidden = self.config.recurrence, self.config.hidden
        heads = layout.value_heads
        project = [
            self.weight(prefix + "in_proj_qkv.weight", layout.width, hidden),
            self.weight(prefix + "in_proj_z.weight", layout.values, hidden),
        ]
        gates = torch.cat([self.tensor(f"{prefix}in_proj_{name}.weight", heads, hidden) for name in "ba"])
        joined = self.kernels.joins_gates
        convolution = self.state_tensor(prefix + "conv1d.weight", layout.width, 1, layout.window)
        rate = -self.state_tensor(prefix + "A_log", heads).exp()
        return DeltaMixer(
            layout=layout,
            project=self.matrix(*project, *([gates] if joined else [])),
            gates=None if joined else self.kernels.float_matrix(gates, None),
            convolution=convolution[:, 0].T.contiguous(),
            decay=Decay(rate, self.state_tensor(prefix + "dt_bias", heads)),
            norm=self.state_tensor(prefix + "norm.weight", layout.value_size),  # a plain factor, unlike all others
            output=self.matrix(self.weight(prefix + "out_proj.weight", hidden, layout.values)),
            index=index,
        )

    def feed_forward(self, prefix: str) -> FeedForward:
        """Dense, or experts stored in one tensor or one by one."""
        experts = self.config.experts
        if experts is None:
            return Dense(self._network(prefix, self.config.intermediate))
        hidden = self.config.hidden
        return Sparse(
            router=self.kernels.float_matrix(self.tensor(prefix + "gate.weight", experts.count, hidden), None),
            experts=self.kernels.pack_experts(self._experts(prefix + "experts.", experts)),
            top=experts.top,
            shared=self._network(prefix + "shared_expert.", experts.shared_inner),
            shared_gate=self.kernels.float_matrix(self.tensor(prefix + "shared_expert_gate.weight", 1, hidden), None),
        )

    def _network(self, prefix: str, inner: int) -> Expert:
        hidden = self.config.hidden
        gate, up = (self.weight(f"{prefix}{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        return Expert(self.matrix(gate, up), self.matrix(self.weight(prefix + "down_proj.weight", hidden, inner)))

    def _experts(self, prefix: str, experts: ExpertsConfig) -> list[Expert]:
        if self.checkpoint.has(prefix + "0.gate_proj.weight"):
            return [self._network(f"{prefix}{number}.", experts.inner) for number in range(experts.count)]
        hidden, inner, count = self.config.hidden, experts.inner, experts.count
        gate_up = self.checkpoint.weight(prefix + "gate_up_proj", (count, 2 * inner, hidden))
        down = self.checkpoint.weight(prefix + "down_proj", (count, hidden, inner))
        return [
            Expert(
                self.matrix(gate_up[number].to(self.device, self.dtype)),
                self.matrix(down[number].to(self.device, self.dtype)),
            )
            for number in range(count)
        ]
