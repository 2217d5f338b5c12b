"""Tiny Qwen3.5 models as GGUF files, changed on the way as llama.cpp's converter changes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, MERGES, SPECIALS, tiny_tokenizer
from tiny_qwen import random_model, save_model

F32 = gguf.GGMLQuantizationType.F32
# As llama.cpp has it: recurrent layers and, as the last of every four, attention; keys and values of one size. Rows
# are multiples of 32, as 8-bit blocks want them.
LAYOUT: dict[str, Any] = {
    "hidden_size": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HEADS = {  # of recurrent layers; a square of heads would look the same tiled and grouped back and forth
    "equal": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "double": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "triple": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
}
DENSE = {"intermediate_size": 96}
SPARSE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
HEAD = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def tiny_folder(
    folder: Path, *, sparse: bool = False, heads: str = "double", tied: bool = False, head: bool = True
) -> Path:
    """A folder with a model that llama.cpp could hold."""
    values = LAYOUT | HEADS[heads] | (SPARSE if sparse else DENSE)
    model = random_model(sparse, tie_word_embeddings=tied, mtp_num_hidden_layers=int(head), **values)
    save_model(folder, model, head=head, fused=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


def write_gguf(
    file: Path,
    folder: Path,
    *,
    kind: str = "F32",
    merged: bool = False,
    leave_out: str = r"(?!)",
    rename: dict[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """The model of a folder as a file, `merged` with one tensor for the gates and ups of experts.

    Tensors whose names match `leave_out` are not written. Metadata by keyword, dots written as two underscores and
    the architecture left out, replaces what the model says; None takes it away.
    """
    config = json.loads((folder / "config.json").read_text())
    sparse = "num_experts" in config
    writer = gguf.GGUFWriter(file, "qwen35moe" if sparse else "qwen35")
    tensors = load_file(folder / "model.safetensors")
    heads = config["mtp_num_hidden_layers"]
    describe(writer, config, heads)
    add_tokenizer(writer)
    for key, value in metadata.items():
        add_value(writer, key.replace("__", "."), value)
    for name, array in renamed(converted(tensors, config), config, sparse, merged):
        name = (rename or {}).get(name, name)
        if not re.search(leave_out, name):
            stored = wanted_kind(name, array, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def wanted_kind(name: str, array: Any, kind: Any) -> Any:
    """Norms, vectors, kernels of convolutions and routers stay in 32 bits."""
    exact = array.ndim == 1 or not name.endswith(".weight") or name.endswith("norm.weight")
    exact = exact or "ssm_conv1d" in name or "ffn_gate_inp" in name
    return F32 if exact or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def describe(writer: Any, config: dict[str, Any], heads: int) -> None:
    writer.add_block_count(config["num_hidden_layers"] + heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if heads:
        writer.add_nextn_predict_layers(heads)


def add_tokenizer(writer: Any) -> None:
    """Files of this family name the end of an answer and what pads, and no beginning."""
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), 300)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge.split()) for merge in MERGES.split(";")])
    writer.add_eos_token_id(SPECIALS.index("<|im_end|>"))
    writer.add_pad_token_id(SPECIALS.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_value(writer: Any, key: str, value: Any) -> None:
    key = key if key.startswith(("tokenizer.", "general.", "prism.", "split.")) else f"{writer.arch}.{key}"
    writer.kv_data[0].pop(key, None)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    if value is not None:
        add[type(value)](key, value)


def converted(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Hugging Face's names, experts stacked, values as the converter leaves them."""
    single = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    stacks: dict[str, dict[int, Any]] = {}
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, front = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def tiled(array: Any, rows: int) -> Any:
        """First value head of every key head, second of every key head, …"""
        each = values // keys
        order = [key * each + turn for turn in range(each) for key in range(keys)]
        return np.concatenate([array[head * rows : (head + 1) * rows] for head in order])

    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if match := single.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
            continue
        part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
        if part == "A_log":
            array = tiled(-tensor.float().exp().numpy(), 1)
        elif part == "dt_bias" or part.startswith(("in_proj_a", "in_proj_b")):
            array = tiled(array, 1)
        elif part.startswith("in_proj_z"):
            array = tiled(array, size)
        elif part.startswith("in_proj_qkv"):
            array = np.concatenate([array[:front], tiled(array[front:], size)])
        elif part.startswith("conv1d"):
            array = np.concatenate([array[:front, 0], tiled(array[front:, 0], size)])
        elif part.startswith("out_proj"):
            array = np.ascontiguousarray(tiled(array.T, size).T)
        elif (name.endswith("norm.weight") or ".pre_fc_norm" in name) and not part:
            array = array + np.float32(1)
        yield name, array
    for name, parts in stacks.items():
        yield name, np.stack([parts[number] for number in range(len(parts))])


def renamed(
    tensors: Iterator[tuple[str, Any]], config: dict[str, Any], sparse: bool, merged: bool
) -> Iterator[tuple[str, Any]]:
    """The gguf package's own names; those of the head, which its older releases lack, written out."""
    layers = config["num_hidden_layers"]
    architecture = gguf.MODEL_ARCH.QWEN35MOE if sparse else gguf.MODEL_ARCH.QWEN35
    names = gguf.get_tensor_name_map(architecture, layers + 9)
    gates: dict[str, Any] = {}
    for name, array in tensors:
        if name.startswith("mtp.") and name.split(".")[1] in HEAD:
            yield f"blk.{layers}.nextn.{HEAD[name.split('.')[1]]}.weight", array
            continue
        if match := re.match(r"mtp\.layers\.(\d+)\.", name):
            name = f"model.layers.{layers + int(match[1])}.{name[match.end() :]}"
        name = name.replace("dt_bias", "dt_proj.bias")
        if name.endswith("experts.gate_up_proj"):
            halves = np.split(array, 2, axis=1)
            pairs = [(name.replace("gate_up", part), half) for part, half in zip(("gate", "up"), halves, strict=True)]
        else:
            pairs = [(name, array)]
        for each, values in pairs:
            whole = f"{each}.weight" if each.endswith("_proj") else each
            found = names.get_name(whole, (".weight", ".bias"))
            if merged and re.search(r"ffn_(gate|up)_exps", found):
                gates[found] = values
            else:
                yield found, values
    for name in sorted(name for name in gates if "gate_exps" in name):
        both = np.concatenate([gates[name], gates[name.replace("gate_exps", "up_exps")]], axis=1)
        yield name.replace("gate_exps", "gate_up_exps"), both
