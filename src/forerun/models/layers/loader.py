"""Reads the layers of decoders, and of their heads, from checkpoints in Hugging Face layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Decay, DeltaLayout, Expert, HeadNorms, Kernels
from forerun.kernels.matrix import Matrix, Table, Weight, as_tensor, join
from forerun.models.layers.config import (
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    ExpertsConfig,
    LayerConfig,
    PerLayerConfig,
)
from forerun.models.layers.feed_forward import Beside, Dense, FeedForward, Sparse
from forerun.models.layers.layer import Layer, PerLayerGate, PerLayerInputs
from forerun.models.layers.mixers import AttentionMixer, DeltaMixer
from forerun.models.layers.rope import RopeTables
from forerun.weights.checkpoint import Checkpoint

# Hugging Face's names of a layer's norms; `post_attention_layernorm` means two things.
NORMS = {"input_norm": "input_layernorm", "pre_feed_forward_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input_norm": "input_layernorm",
    "post_mixer_norm": "post_attention_layernorm",
    "pre_feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
}


@dataclass(slots=True)
class Loader:
    """Takes tensors by name, checks shapes, fuses projections. Norms come out as the factor to multiply with."""

    config: DecoderConfig
    kernels: Kernels
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    rope: RopeTables

    def layer(self, prefix: str, config: LayerConfig, index: int) -> Layer:
        """The layer whose tensors begin with `prefix`; `index` says where its state is, as `state_index` does."""
        names = SANDWICH_NORMS if self.config.sandwich_norms else NORMS
        return Layer(
            mixer=self._delta(prefix + "linear_attn.", config.mixer, index)
            if isinstance(config.mixer, DeltaLayout)
            else self._attention(prefix + "self_attn.", config.mixer, index),
            feed_forward=self._feed_forward(prefix + "mlp.", config.feed_forward),
            eps=self.config.eps,
            beside=None if config.beside is None else self._beside(prefix, config.beside),
            per_layer=None
            if self.config.per_layer is None
            else self._per_layer_gate(prefix, self.config.per_layer.size),
            scalar=float(self.checkpoint.take(prefix + "layer_scalar", (1,))) if self.config.layer_scalars else 1.0,
            **{place: self.norm(f"{prefix}{name}.weight", self.config.hidden) for place, name in names.items()},
        )

    def norm(self, name: str, size: int) -> Tensor:
        """In float32, as small as it is: it multiplies float32 values."""
        stored = self.wide(name, size)
        return 1 + stored if self.config.zero_centred_norms else stored

    def wide(self, name: str, *shape: int) -> Tensor:
        """In float32, however it is stored: norms, and what decides about a recurrent state."""
        return self.checkpoint.take(name, shape).to(self.device, torch.float32)

    def exact(self, name: str, *shape: int) -> Matrix:
        """A matrix that is never quantised."""
        return self.kernels.float_matrix(self._tensor(name, *shape), None)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, shape).to(self.device, self.dtype)

    def _weight(self, name: str, *shape: int) -> Weight:
        """In the precision of activations, or in 8 bits when it is stored so."""
        return self.checkpoint.weight(name, shape).to(self.device, self.dtype)

    def _fused(self, prefix: str, outs: dict[str, int], width: int, bias: bool = False) -> Matrix:
        """Several projections of the same input as one matrix."""
        parts = [self._weight(f"{prefix}{name}.weight", out, width) for name, out in outs.items()]
        biases = [self._tensor(f"{prefix}{name}.bias", out) for name, out in outs.items()] if bias else []
        return self._joined(parts, biases)

    def _joined(self, parts: list[Weight], biases: list[Tensor] | None = None) -> Matrix:
        return self.kernels.matrix(join(parts), torch.cat(biases) if biases else None)

    def _attention(self, prefix: str, config: AttentionConfig, index: int) -> AttentionMixer:
        layout, hidden = config.spec.layout, self.config.hidden
        norms: HeadNorms | None = None
        if config.head_norms:
            queries_norm = self.norm(prefix + "q_norm.weight", layout.size)
            keys_norm = self.norm(prefix + "k_norm.weight", layout.size) if layout.kv_heads else queries_norm
            values_norm = torch.ones(layout.size, device=self.device) if config.value_norms else None
            norms = HeadNorms(queries_norm, keys_norm, self.config.eps, values_norm)
        return AttentionMixer(
            spec=config.spec,
            rope=self.rope[config.rope],
            project=self._projection(prefix, config),
            gated=config.gated,
            head_norms=norms,
            output=self._fused(prefix, {"o_proj": hidden}, layout.key_column, config.output_bias),
            index=index,
        )

    def _projection(self, prefix: str, config: AttentionConfig) -> Matrix:
        """Queries, keys, values and, where there are any, gates."""
        layout, hidden = config.spec.layout, self.config.hidden
        queries, keys = layout.key_column, layout.kv_heads * layout.size
        if config.values_are_keys:
            q = self._weight(prefix + "q_proj.weight", queries, hidden)
            k = self._weight(prefix + "k_proj.weight", keys, hidden)
            return self._joined([q, k, k])
        if not config.gated:
            outs = {"q_proj": queries} | ({"k_proj": keys, "v_proj": keys} if keys else {})
            return self._fused(prefix, outs, hidden, config.qkv_bias)
        assert not config.qkv_bias, "no family has both"
        # The file has the query rows and then the gate rows of each head.
        both = self._weight(prefix + "q_proj.weight", 2 * queries, hidden)
        query_rows, gate_rows = torch.arange(2 * queries).view(layout.heads, 2, layout.size).unbind(1)
        k, v = (self._weight(f"{prefix}{name}_proj.weight", keys, hidden) for name in "kv")
        return self._joined([both[query_rows.flatten()], k, v, both[gate_rows.flatten()]])

    def _delta(self, prefix: str, layout: DeltaLayout, index: int) -> DeltaMixer:
        hidden, heads = self.config.hidden, layout.value_heads
        project = [
            self._weight(prefix + "in_proj_qkv.weight", layout.width, hidden),
            self._weight(prefix + "in_proj_z.weight", layout.values, hidden),
        ]
        gates = torch.cat([self._tensor(f"{prefix}in_proj_{name}.weight", heads, hidden) for name in "ba"])
        joined = self.kernels.joins_gates
        convolution = self.wide(prefix + "conv1d.weight", layout.width, 1, layout.window)
        rate = -self.wide(prefix + "A_log", heads).exp()
        return DeltaMixer(
            layout=layout,
            project=self._joined([*project, *([gates] if joined else [])]),
            gates=None if joined else self.kernels.float_matrix(gates, None),
            convolution=convolution[:, 0].T.contiguous(),
            decay=Decay(rate, self.wide(prefix + "dt_bias", heads)),
            norm=self.wide(prefix + "norm.weight", layout.value_size),  # a plain factor in every family
            eps=self.config.eps,
            output=self._fused(prefix, {"out_proj": hidden}, layout.values),
            index=index,
        )

    def _feed_forward(self, prefix: str, config: DenseConfig | ExpertsConfig) -> FeedForward:
        if isinstance(config, DenseConfig):
            return Dense(self._network(prefix, config.inner, config.bias), config.activation)
        return Sparse(
            router=self.exact(prefix + "gate.weight", config.count, self.config.hidden),
            experts=self.kernels.pack_experts(self._experts(prefix + "experts.", config)),
            top=config.top,
            shared=self._network(prefix + "shared_expert.", config.shared_inner),
            shared_gate=self.exact(prefix + "shared_expert_gate.weight", 1, self.config.hidden),
        )

    def _beside(self, prefix: str, config: ExpertsConfig) -> Beside:
        hidden, count = self.config.hidden, config.count

        def norm(name: str) -> Tensor:
            return self.norm(f"{prefix}{name}.weight", hidden)

        return Beside(
            router=self.exact(prefix + "router.proj.weight", count, hidden),
            router_norm=self.wide(prefix + "router.scale", hidden) * hidden**-0.5,
            expert_scale=self.wide(prefix + "router.per_expert_scale", count),
            experts=self.kernels.pack_experts(self._experts(prefix + "experts.", config)),
            top=config.top,
            activation=config.activation,
            input_norm=norm("pre_feedforward_layernorm_2"),
            network_norm=norm("post_feedforward_layernorm_1"),
            output_norm=norm("post_feedforward_layernorm_2"),
        )

    def _per_layer_gate(self, prefix: str, size: int) -> PerLayerGate:
        hidden = self.config.hidden
        return PerLayerGate(
            gate=self._fused(prefix, {"per_layer_input_gate": size}, hidden),
            project=self._fused(prefix, {"per_layer_projection": hidden}, size),
            norm=self.norm(prefix + "post_per_layer_input_norm.weight", hidden),
        )

    def per_layer_inputs(self, prefix: str, layers: int, config: PerLayerConfig) -> PerLayerInputs:
        """What makes the layers' own inputs."""
        size, hidden = config.size, self.config.hidden
        table = self.checkpoint.table(prefix + "embed_tokens_per_layer.weight", (config.vocab, layers * size))
        return PerLayerInputs(
            table=embedding_table(table, self.device, self.dtype),
            table_scale=rounded(size**0.5, table.dtype),
            project=self._fused(prefix, {"per_layer_model_projection": layers * size}, hidden),
            norm=self.norm(prefix + "per_layer_projection_norm.weight", size),
            eps=self.config.eps,
        )

    def _network(self, prefix: str, inner: int, bias: bool = False) -> Expert:
        hidden = self.config.hidden
        return Expert(
            self._fused(prefix, {"gate_proj": inner, "up_proj": inner}, hidden, bias),
            self._fused(prefix, {"down_proj": hidden}, inner, bias),
        )

    def _experts(self, prefix: str, config: ExpertsConfig) -> list[Expert]:
        """Stored one by one, or all in one tensor, gates apart in some files."""
        if self.checkpoint.has(prefix + "0.gate_proj.weight"):
            return [self._network(f"{prefix}{number}.", config.inner) for number in range(config.count)]
        hidden, inner, count = self.config.hidden, config.inner, config.count
        apart = {"gate_proj": inner, "up_proj": inner}
        if self.checkpoint.has(prefix + "gate_up_proj") or not self.checkpoint.has(prefix + "gate_proj"):
            apart = {"gate_up_proj": 2 * inner}
        opening = [self.checkpoint.weight(prefix + name, (count, rows, hidden)) for name, rows in apart.items()]
        closing = [self.checkpoint.weight(prefix + "down_proj", (count, hidden, inner))]

        def one(stacks: list[Weight], number: int) -> Matrix:
            return self._joined([stack[number].to(self.device, self.dtype) for stack in stacks])

        return [Expert(one(opening, number), one(closing, number)) for number in range(count)]


def embedding_table(stored: Table, device: torch.device, dtype: torch.dtype) -> Table:
    """On a GPU in the precision of activations; on a CPU as stored, mapped from the file."""
    return stored if device.type == "cpu" else as_tensor(stored.to(device, dtype))


def rounded(number: float, dtype: torch.dtype) -> float:
    """As models compute it that hold such a number in the precision of their weights."""
    return float(torch.tensor(number, dtype=dtype))
