"""Configs against transformers' own classes: what absent keys mean in each family, and which keys are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tiny import tiny_config

from forerun.errors import ForerunError
from forerun.models.families import read_config
from forerun.models.layers.config import AttentionConfig, ExpertsConfig
from forerun.models.layers.rope import ORIGINAL
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_not_given_is_as_wide_as_usual(family: str) -> None:
    config = tiny_config(family, model_type=family, use_sliding_window=True, max_window_layers=1)
    assert [heads[3] for heads in described(config)["heads"]] == [0, 4096]


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
WHOLE = "rope_parameters must be settings of sliding_attention and of full_attention"
UNREAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention in both directions": ("llama", {"is_causal": False}, "is_causal = False is not supported"),
    "layers that differ": ("qwen3", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config = .* is not"),
    "a part of each head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    "a part of each head, by its settings": (
        "mistral",
        {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}},
        r"rope_parameters\.partial_rotary_factor = 0.5 is not supported",
    ),
    "a part of a part": (
        "qwen3_5_text",
        {"rope_parameters": {"rope_type": "proportional"}},
        ".* 'proportional' is not",
    ),
    "two opinions": ("qwen2", {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling says"),
    "more under the old name": (
        "qwen2",
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LINEAR},
        "rope_scaling says",
    ),
    "chunks": ("mistral", {"layer_types": ["chunked_attention"] * 2}, "layer_types must name 2 layers, each"),
    "windows": ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types = .* is not supported"),
    "one rotation for all layers of Gemma 3": ("gemma3_text", {"rope_parameters": LINEAR}, WHOLE),
    "one rotation for all layers of Gemma 4": ("gemma4_text", {"rope_parameters": LINEAR}, WHOLE),
    "layers that are not rotated": (
        "gemma4_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": None}},
        WHOLE,
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_changes_the_numbers_and_is_not_read_is_refused_by_name(case: str) -> None:
    family, changes, message = UNREAD[case]
    values = {"model_type": family} if family.endswith("text") else tiny_config(family, model_type=family)
    read_config(ConfigReader(values, "config.json"))
    with pytest.raises(ForerunError, match=f"^config.json: {message}"):
        read_config(ConfigReader(values | changes, "config.json"))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_context_beside_the_settings_of_the_rotation_has_the_first_word(kind: str) -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": kind, "factor": 8.0, "rope_theta": 10000.0, ORIGINAL: 400}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    config = tiny_config("llama", model_type="llama", rope_parameters=rope, original_max_position_embeddings=16)
    (found,) = read_config(ConfigReader(copy.deepcopy(config), "config.json")).ropes
    theirs = LlamaConfig(**config)
    theirs.standardize_rope_params()  # as a model does that is built from it
    assert found.original_max_position_embeddings == theirs.rope_parameters[ORIGINAL] == 16


@pytest.mark.parametrize("old", [LINEAR, {"type": "linear", "factor": 4.0}])
def test_the_same_under_two_names_is_no_contradiction(old: dict[str, Any]) -> None:
    """Older forms called the type otherwise and had the base beside the settings."""
    config = tiny_config("qwen2", model_type="qwen2", rope_parameters=LINEAR, rope_scaling=old)
    assert [rope.factor for rope in read_config(ConfigReader(config, "config.json")).ropes] == [4.0]
