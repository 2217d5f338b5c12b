"""Tiny random Gemma 4 models of every variant, saved in every layout that checkpoints come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_tokenizer

WINDOW = 12
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "E4B": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": True,
    },
    "26B-A4B": {
        **KEYS_AS_VALUES,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "31B": {**KEYS_AS_VALUES},
    "12B": {**KEYS_AS_VALUES},
}


def random_gemma(variant: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model to compare with."""
    import transformers

    unified = variant == "12B"
    values = SIZES | VARIANTS[variant] | overrides
    if unified:
        values = {name: value for name, value in values.items() if "per_layer_input" not in name}
    name = "Gemma4Unified" if unified else "Gemma4"
    config = getattr(transformers, name + "TextConfig")(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
        randomise(model, values["initializer_range"])
    return model


def randomise(model: Any, size: float) -> None:
    """Norms, scalars and scales start as ones: give them values, so that forgetting one is noticed."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.7, 1.1)
            elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                tensor.normal_(1.0, 0.2)
            elif tensor.dim() >= 2 and name in dict(model.named_parameters()):
                tensor.normal_(0.0, size)


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The older way to say what differs in layers without a window."""
    config = dict(config)
    changes = next(iter(config.pop("per_layer_config").values()))
    return config | {
        "global_head_dim": changes["head_dim"],
        "num_global_key_value_heads": changes.get("num_key_value_heads"),
    }


def save_gemma(
    folder: Path, model: Any, *, nested: bool = False, flat: bool = False, eos: int | None = None, **overrides: Any
) -> Path:
    """Write a folder: flat config and `model.`, or nested beside towers and `model.language_model.`."""
    config = json.loads(model.config.to_json_string())
    if eos is not None:
        config["eos_token_id"] = eos
    if flat:
        config = flat_config(config)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if nested:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.embed_vision.embedding_projection.weight"] = torch.ones(3, 4)
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | overrides))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_gemma(folder: Path, variant: str, *, seed: int = 0, **options: Any) -> Path:
    """A folder with a random model; options of `save_gemma`."""
    return save_gemma(folder, random_gemma(variant, seed), **options)


def random_assistant(target: Any, *, clusters: int = 0, seed: int = 1, **overrides: Any) -> Any:
    """A transformers assistant for `target`: three layers with a window and one without; `clusters` of tokens."""
    import transformers

    unified = target.config.model_type.startswith("gemma4_unified")
    name = "Gemma4Unified" if unified else "Gemma4"
    theirs = target.config
    per_layer = {} if unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    small, wide = (theirs.per_layer_config[at] for at in (0, theirs.num_hidden_layers - 1))
    values: dict[str, Any] = {
        "vocab_size": theirs.vocab_size, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "num_attention_heads": 4,
        "num_key_value_heads": small.num_key_value_heads, "head_dim": small.head_dim,
        "global_head_dim": wide.head_dim, "num_global_key_value_heads": wide.num_key_value_heads,
        "attention_k_eq_v": theirs.attention_k_eq_v, "sliding_window": theirs.sliding_window,
        "num_kv_shared_layers": 4, "rope_parameters": theirs.rope_parameters, "initializer_range": 0.15,
        **per_layer,
    }  # fmt: skip
    backbone = overrides.pop("backbone_hidden_size", theirs.hidden_size)
    text = getattr(transformers, name + "TextConfig")(**(values | overrides))
    config = getattr(transformers, name + "AssistantConfig")(
        text_config=text, backbone_hidden_size=backbone, use_ordered_embeddings=clusters > 0,
        num_centroids=clusters or 2048, centroid_intermediate_top_k=max(1, clusters // 4),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name + "AssistantForCausalLM")(config).float().eval()
        randomise(model, 0.15)
        if clusters:
            model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    return model


def save_assistant(folder: Path, model: Any, **overrides: Any) -> Path:
    """Write a folder as the hub has them."""
    config = json.loads(model.config.to_json_string()) | overrides
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
