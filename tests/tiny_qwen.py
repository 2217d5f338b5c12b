"""Tiny random Qwen3.5 models, dense and sparse, saved in every layout that checkpoints come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
DENSE = {"intermediate_size": 80}
SPARSE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}


def random_model(sparse: bool, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model to compare with."""
    import transformers

    name = "Qwen3_5Moe" if sparse else "Qwen3_5"
    values = SIZES | (SPARSE if sparse else DENSE) | overrides
    config = getattr(transformers, name + "TextConfig")(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
        randomise_qwen(model, values["initializer_range"])
    return model


def randomise_qwen(model: Any, size: float) -> None:
    """Norms, decays and scales too: give them values, so that forgetting one is noticed."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")):
                parameter.normal_(0.0, 0.1)  # zero-centred
            elif key.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.1)
            elif key.endswith("A_log"):
                parameter.uniform_(-3.0, 1.0)
            elif key.endswith(("dt_bias", "conv1d.weight")):
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, size)


def head_tensors(model: Any, fused: bool, seed: int = 5) -> dict[str, torch.Tensor]:
    """`mtp.*`: random, with the block's weights near those of the model's attention layer."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, size: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size

    hidden = model.config.hidden_size
    place = model.config.layer_types.index("full_attention")
    source = f"model.layers.{place}."
    tensors = {
        "mtp.layers.0." + name.removeprefix(source): tensor + noise(*tensor.shape, size=0.02)
        for name, tensor in model.state_dict().items()
        if name.startswith(source)
    }
    tensors["mtp.fc.weight"] = noise(hidden, 2 * hidden)
    tensors["mtp.pre_fc_norm_embedding.weight"] = noise(hidden) - 0.44
    tensors["mtp.pre_fc_norm_hidden.weight"] = noise(hidden)
    tensors["mtp.norm.weight"] = noise(hidden)
    together = "mtp.layers.0.mlp.experts."
    if not fused and together + "gate_up_proj" in tensors:
        gate_up, down = tensors.pop(together + "gate_up_proj"), tensors.pop(together + "down_proj")
        for number, (both, back) in enumerate(zip(gate_up, down, strict=True)):
            gate, up = both.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": back}
            tensors |= {f"{together}{number}.{name}.weight": part for name, part in parts.items()}
    return tensors


def save_model(
    folder: Path, model: Any, *, nested: bool = False, head: bool = True, fused: bool = True, **config_overrides: Any
) -> Path:
    """Write a folder: flat config and `model.`, or nested beside a vision model and `model.language_model.`."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    if nested:
        tensors = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        }
        tensors["model.visual.pos_embed.weight"] = torch.ones(3, 4)
        tensors["model.visual.blocks.0.attn.qkv.bias"] = torch.ones(6)
        config = {
            "model_type": config["model_type"].removesuffix("_text"),
            "text_config": config,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    if head:
        tensors |= head_tensors(model, fused)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | config_overrides))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_qwen(folder: Path, *, sparse: bool = False, seed: int = 0, **options: Any) -> Path:
    """A folder with a random model; options of `save_model`."""
    return save_model(folder, random_model(sparse, seed), **options)


def tiny_of(folder: Path, family: str) -> Path:
    """A folder with a random model of any family, those of Qwen3.5 beside a vision model."""
    if family.startswith("qwen3_5"):
        return tiny_qwen(folder, sparse=family.endswith("moe"), nested=True)
    return tiny_model(folder, family)
