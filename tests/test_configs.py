"""Configs against transformers' own classes: what absent keys mean in each family."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.models.families import read_config
from forerun.models.layers.config import AttentionConfig, ExpertsConfig
from forerun.weights.config_reader import ConfigReader

NESTED = {
    "gemma3": "Gemma3Config",
    "gemma4": "Gemma4Config",
    "gemma4_unified": "Gemma4UnifiedConfig",
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
}
# What the config.json of Gemma 3 4B says of its language model, and no more.
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def described(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes that we read."""
    found = read_config(ConfigReader(config, "config.json"))
    mixers = [layer.mixer for layer in found.layers if isinstance(layer.mixer, AttentionConfig)]
    networks = [layer.feed_forward for layer in found.layers]
    return {
        "vocab_size": found.vocab,
        "hidden_size": found.hidden,
        "num_hidden_layers": len(found.layers),
        "max_position_embeddings": found.context,
        "rms_norm_eps": found.eps,
        "tie_word_embeddings": found.tied,
        "heads": [
            (mixer.spec.layout.heads, mixer.spec.layout.kv_heads, mixer.spec.layout.size, mixer.spec.window)
            for mixer in mixers
        ],
        "networks": [
            (n.inner, n.count, n.top, n.shared_inner) if isinstance(n, ExpertsConfig) else n.inner for n in networks
        ],
    }


def theirs(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes that transformers reads."""
    import transformers

    whole = getattr(transformers, NESTED[config["model_type"]])(**config)
    text = whole.text_config
    layers = text.per_layer_config if text.is_heterogeneous else [text] * text.num_hidden_layers
    kinds = zip(layers, text.layer_types, strict=True)
    experts = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
    sparse = config["model_type"] == "qwen3_5_moe"
    network = tuple(getattr(text, name) for name in experts) if sparse else text.intermediate_size
    plain = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps")
    return {name: getattr(text, name) for name in plain} | {
        "tie_word_embeddings": whole.tie_word_embeddings,
        "heads": [
            (
                layer.num_attention_heads,
                layer.num_key_value_heads,
                layer.head_dim,
                text.sliding_window if kind == "sliding_attention" else 0,
            )
            for layer, kind in kinds
            if kind != "linear_attention"
        ],
        "networks": [network] * text.num_hidden_layers,
    }


@pytest.mark.parametrize("family", NESTED)
def test_absent_keys_mean_what_they_mean_in_transformers(family: str) -> None:
    config = {"model_type": family, "text_config": {"model_type": f"{family}_text"}}
    assert described(config) == theirs(config)


def test_the_short_config_of_gemma_3_4b() -> None:
    found = described(GEMMA3_4B)
    assert found == theirs(GEMMA3_4B)
    assert found["heads"][5] == (8, 4, 256, 0) and found["heads"][0] == (8, 4, 256, 1024)
