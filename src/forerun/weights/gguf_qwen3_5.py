"""GGUF files of Qwen3.5, dense (`qwen35`) and with experts (`qwen35moe`), said in Hugging Face's words.

What is read is the form that llama.cpp's converter gives them, text only. It has been one since the first such file, in
February 2026, up to its source of August 2026; MTP heads are in it since May.

- `block_count` counts the layers and, behind them, the `nextn_predict_layers` blocks of the MTP head.
- Norms are stored as factors, 1 + w, those of the head too; `ssm_norm` alone is as it was.
- `ssm_a` is -exp(A_log), and kernels of convolutions have lost the axis of length 1.
- Value heads of recurrent layers are tiled: the first of every key head, then the second of every key head. Hugging
  Face has them grouped: all of the first key head, then all of the next.
- Queries and their gates stay interleaved by head, as in Hugging Face's files.

Ollama's own conversions differ in names and metadata, and nothing in them says what else differs: they are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.errors import ForerunError
from forerun.weights.arrangement import Arrangement, Order
from forerun.weights.gguf_header import GgufTensor
from forerun.weights.gguf_metadata import Metadata

if TYPE_CHECKING:
    from torch import Tensor

SPARSE = "qwen35moe"
QWEN3_5 = {"qwen35": "Qwen3_5ForCausalLM", SPARSE: "Qwen3_5MoeForCausalLM"}
RECURRENT, ATTENTION = "linear_attention", "full_attention"
INTERVAL = 4  # every so many layers one has attention, when a file does not say
LAYER_NAMES = {  # that other families lack, or call otherwise
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
JOIN = "nextn.eh_proj.weight"  # what makes a block an MTP head
OWN_VOCABULARY = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
HEAD_NAMES = {
    JOIN: "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
    OWN_VOCABULARY[0]: "mtp.embed_tokens.weight",
    OWN_VOCABULARY[1]: "mtp.shared_head.head.weight",
}
BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


def head_name(block: int, part: str, layer_names: Mapping[str, str]) -> str | None:
    """Hugging Face's name of a tensor of the MTP head; `block` counts from the first behind the layers."""
    if part in layer_names:
        return f"mtp.layers.{block}.{layer_names[part]}"
    return f"mtp.layers.{block}.{part}" if block else HEAD_NAMES.get(part)


def qwen3_5_config(metadata: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Qwen3.5 file; `rope` has the base and the scaling of its angles."""
    _refuse_ollama(metadata)
    layers, heads = _blocks(metadata)
    values = metadata.integer("ssm.time_step_rank")
    config = metadata.common_config() | {
        "model_type": "qwen3_5_moe_text" if metadata.architecture == SPARSE else "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": _layer_kinds(metadata, layers),
        "num_key_value_heads": metadata.integer("attention.head_count_kv"),
        "head_dim": metadata.integer("attention.key_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // values,
        "rope_parameters": rope | _rotation(metadata),
        "mtp_num_hidden_layers": heads,
        "mtp_use_dedicated_embeddings": any(f"blk.{layers}.{name}" in metadata.shapes for name in OWN_VOCABULARY),
    }
    for whole, part in (("ssm.inner_size", values), ("ssm.time_step_rank", config["linear_num_key_heads"])):
        if (found := metadata.integer(whole)) % part:
            raise ForerunError(f"{metadata.name(whole)} is {found}, no multiple of {part}")
    return config | _networks(metadata)


def qwen3_5_arrangement(tensor: GgufTensor, config: dict[str, Any], where: str) -> Arrangement:
    """How a tensor of the file becomes that of Hugging Face's files."""
    match, place, shape = BLOCK.fullmatch(tensor.name), f"{where}: tensor {tensor.name}", tensor.shape
    part = tensor.name if match is None else match[2]
    if part.endswith("norm.weight") and part != "ssm_norm.weight":
        return Arrangement(shape, change=lambda values: values.float() - 1)
    if part == "ffn_gate_inp_shexp.weight":
        return Arrangement((1, math.prod(shape)))  # quantising drops the axis of length 1
    size = config["linear_value_head_dim"]
    behind = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]  # queries and keys come first
    if part == "attn_qkv.weight":
        return Arrangement(shape, rows=_grouped(tensor, place, config, 0, size, behind))
    if part == "ssm_conv1d.weight":
        order = _grouped(tensor, place, config, 0, size, behind)
        return Arrangement((shape[0], 1, *shape[1:]), rows=order)
    if part == "ssm_a":
        order = _grouped(tensor, place, config, 0, 1)
        return Arrangement(shape, rows=order, change=lambda values: _log_decay(values, place))
    if part in ("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return Arrangement(shape, rows=_grouped(tensor, place, config, 0, 1))
    if part == "attn_gate.weight":
        return Arrangement(shape, rows=_grouped(tensor, place, config, 0, size))
    if part == "ssm_out.weight":
        return Arrangement(shape, columns=_grouped(tensor, place, config, 1, size))
    return Arrangement(shape)


def _log_decay(stored: Tensor, place: str) -> Tensor:
    if not bool((stored < 0).all()):
        raise ForerunError(f"{place} must hold negative numbers only; the file is damaged")
    return (-stored.float()).log()


def _grouped(tensor: GgufTensor, place: str, config: dict[str, Any], axis: int, size: int, behind: int = 0) -> Order:
    """Value heads of `size` rows along `axis`, behind others that stay: tiled → grouped. `place`: for messages."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    found, expected = tensor.shape[axis] if axis < len(tensor.shape) else 0, behind + values * size
    if found != expected:
        raise ForerunError(f"{place} has {found} rows or columns, expected {expected}; the file is damaged")
    heads = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(behind), behind + heads])


def _refuse_ollama(metadata: Metadata) -> None:
    keys = [key for key in ("ssm.v_head_reordered", "rope.mrope_interleaved") if key in metadata]
    names = [name for name in metadata.shapes if name.startswith(("v.", "mm.", "mtp.")) or name.endswith(".ssm_dt")]
    if keys or names:
        raise ForerunError(
            f"{metadata.where}: Qwen3.5 as Ollama writes it is not read ({(keys + names)[0][:80]}); "
            "use a GGUF file made by llama.cpp, or the safetensors folder"
        )


def _blocks(metadata: Metadata) -> tuple[int, int]:
    """How many layers there are, and how many blocks of an MTP head: every tensor must agree."""
    where, key = metadata.where, "nextn_predict_layers"
    blocks, heads = metadata.integer("block_count"), metadata.integer(key, 0, low=0)
    layers = blocks - heads
    if layers < 1:
        raise ForerunError(f"{metadata.name(key)} is {heads}, but there are only {blocks} blocks")
    parts: dict[int, set[str]] = {}
    for name in metadata.shapes:
        if match := BLOCK.fullmatch(name):
            parts.setdefault(int(match[1]), set()).add(match[2])
    if heads and parts.keys() and not any(index < layers for index in parts):
        raise ForerunError(f"{where} holds an MTP head without its model: give the GGUF file of the whole model")
    if (absent := next((index for index in range(layers) if index not in parts), None)) is not None:
        raise ForerunError(f"{where}: metadata tells of {layers} layers, but there are no tensors of layer {absent}")
    for index, found in sorted(parts.items()):
        if index >= blocks:
            raise ForerunError(f"{where}: tensors of block {index}, but metadata tells of {blocks} blocks")
        if (index == layers and JOIN not in found) or (index < layers and JOIN in found):
            raise ForerunError(
                f"{metadata.name(key)} is {heads} of {blocks} blocks, "
                f"but block {index} has {'no' if index == layers else 'a'} tensor {JOIN}"
            )
    return layers, heads


def _layer_kinds(metadata: Metadata, layers: int) -> list[str]:
    """As metadata says, and as the tensors show."""
    key = "attention.recurrent_layers"
    listed = metadata.values.get(key)
    if isinstance(listed, tuple):
        if len(listed) < layers:
            raise ForerunError(f"{metadata.name(key)} tells of {len(listed)} layers, there are {layers}")
        kinds = [RECURRENT if one else ATTENTION for one in listed[:layers]]
    else:
        interval = metadata.integer("full_attention_interval", INTERVAL)
        kinds = [RECURRENT if (layer + 1) % interval else ATTENTION for layer in range(layers)]
    signs = {RECURRENT: "ssm_a", ATTENTION: "attn_q.weight"}
    for layer, stated in enumerate(kinds):
        found = [kind for kind, part in signs.items() if f"blk.{layer}.{part}" in metadata.shapes]
        if found != [stated]:
            shown = " and ".join(found) or "neither kind"
            raise ForerunError(
                f"{metadata.where}: metadata calls layer {layer} {stated}, its tensors are those of {shown}"
            )
    return kinds


def _rotation(metadata: Metadata) -> dict[str, Any]:
    """How much of a head is rotated, and which pairs of columns turn with time, height and width."""
    size, turned = metadata.integer("attention.key_length"), metadata.integer("rope.dimension_count")
    listed = metadata.values.get("rope.dimension_sections")
    sections = [each for each in listed if isinstance(each, int)] if isinstance(listed, tuple) else []
    if (
        int(size * (turned / size)) != turned
        or turned > size
        or metadata.integer("attention.value_length", size) != size
    ):
        raise ForerunError(f"{metadata.where}: heads of {size} columns, {turned} of them rotated, are not read")
    if len(sections) != 4 or sections[3] or min(sections[:3]) < 1:
        raise metadata.wrong("rope.dimension_sections", "three numbers and a zero")
    return {
        "partial_rotary_factor": turned / size,
        "mrope_section": sections[:3],
        "mrope_interleaved": True,
    }


def _networks(metadata: Metadata) -> dict[str, Any]:
    if metadata.architecture != SPARSE:
        return {"intermediate_size": metadata.integer("feed_forward_length")}
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }
