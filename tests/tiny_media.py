"""Tiny random models that see and hear, saved as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_tokenizer
from tiny_gemma import SIZES, VARIANTS, randomise
from tiny_qwen import DENSE, SPARSE, head_tensors, randomise_qwen
from tiny_qwen import SIZES as QWEN_SIZES

SOFT_TOKENS = 70  # the smallest budget of a picture
FRAMES = 3
# Tokens that stand for media: they follow the 290 of the tokenizer.
GEMMA_TOKENS = {
    "image_token_id": "<|image|>",
    "audio_token_id": "<|audio|>",
    "video_token_id": "<|video|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
}
GEMMA_IDS = {name: 290 + index for index, name in enumerate(GEMMA_TOKENS)}
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_IDS = {name: 290 + index for index, name in enumerate(QWEN_TOKENS)}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": QWEN_SIZES["hidden_size"],
    "num_position_embeddings": 36,
    "initializer_range": 0.15,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 256,
    "initializer_range": 0.15,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],  # the first is also the number of bands of a spectrogram
    "output_proj_dims": 24,
    "initializer_range": 0.15,
}


def media_tokenizer(tokens: list[str]) -> Any:
    """The tiny tokenizer, and tokens that stand for media."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def random_media_gemma(variant: str, seed: int = 0) -> Any:
    """A transformers model with towers: E4B sees and hears, 31B sees, its pictures whole."""
    import transformers

    whole = None if variant == "E4B" else "vision"
    values = SIZES | VARIANTS[variant] | {"use_bidirectional_attention": whole, "max_position_embeddings": 1024}
    text = transformers.Gemma4TextConfig(**values)
    clipped = variant == "E4B"
    vision = transformers.Gemma4VisionConfig(**VISION, use_clipped_linears=clipped, standardize=not clipped)
    audio = transformers.Gemma4AudioConfig(**AUDIO) if variant == "E4B" else None
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, **GEMMA_IDS)
    return randomised(transformers.Gemma4ForConditionalGeneration, config, seed)


def random_unified(seed: int = 0) -> Any:
    """A transformers model that sees and hears without towers."""
    import transformers

    values = SIZES | VARIANTS["12B"] | {"use_bidirectional_attention": "vision", "max_position_embeddings": 1024}
    text = {name: value for name, value in values.items() if "per_layer_input" not in name}
    config = transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(**text),
        vision_config=transformers.Gemma4UnifiedVisionConfig(mm_embed_dim=40, output_proj_dims=40, mm_posemb_size=80),
        audio_config=transformers.Gemma4UnifiedAudioConfig(),
        **GEMMA_IDS,
    )
    return randomised(transformers.Gemma4UnifiedForConditionalGeneration, config, seed)


def randomised(kind: Any, config: Any, seed: int) -> Any:
    """A model of random weights, norms, scales and bounds included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).float().eval()
        randomise(model, 0.15)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("input_min", "output_min")):
                    tensor.fill_(-4.0)
                elif name.endswith(("input_max", "output_max")):
                    tensor.fill_(4.0)
                elif name.endswith(("std_bias", "per_dim_scale")):
                    tensor.normal_(0.0, 0.2)
                elif name.endswith("std_scale"):
                    tensor.normal_(1.0, 0.2)
    return model


def save_media_gemma(folder: Path, model: Any, *, published: bool = False, **overrides: Any) -> Path:
    """A folder as the hub has them, its processors set to small pictures and short films."""
    config = json.loads(model.config.to_json_string())
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if published:
        tensors = {published_name(name): tensor for name, tensor in tensors.items()}
    processors = {
        "image_processor": {"max_soft_tokens": SOFT_TOKENS},
        "video_processor": {"max_soft_tokens": SOFT_TOKENS, "num_frames": FRAMES},
    }
    return write_folder(folder, config | overrides, tensors, list(GEMMA_TOKENS.values()), processors)


def published_name(name: str) -> str:
    """What the published files of the model without towers call a tensor."""
    if "multimodal_embedder." in name:
        return name.replace("multimodal_embedder.", "")
    return name.replace("model.embed_vision.", "model.vision_embedder.")


def write_folder(folder: Path, config: Any, tensors: Any, tokens: list[str], processors: Any) -> Path:
    """Config, weights, tokenizer and processors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(processors))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    media_tokenizer(tokens).save_pretrained(folder)
    return folder


def random_media_qwen(sparse: bool, seed: int = 0) -> Any:
    """A transformers model that sees; rotated columns are many enough for time, height and width."""
    import transformers

    name = "Qwen3_5Moe" if sparse else "Qwen3_5"
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}
    values = QWEN_SIZES | {"rope_parameters": rope | {"mrope_interleaved": True}, "max_position_embeddings": 1024}
    config = getattr(transformers, name + "Config")(
        text_config=getattr(transformers, name + "TextConfig")(**values, **(SPARSE if sparse else DENSE)),
        vision_config=getattr(transformers, name + "VisionConfig")(**QWEN_VISION),
        **QWEN_IDS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name + "ForConditionalGeneration")(config).float().eval()
        randomise_qwen(model, 0.15)
        with torch.no_grad():
            for name, parameter in model.model.visual.named_parameters():
                if parameter.dim() == 1:
                    parameter.normal_(float("norm" in name and name.endswith("weight")), 0.2)
    return model


def save_media_qwen(folder: Path, model: Any, **overrides: Any) -> Path:
    """A folder as the hub has them, with an MTP head, its processors set to small pictures."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = SimpleNamespace(config=model.config.text_config, state_dict=lambda: language_tensors(tensors))
    tensors |= head_tensors(text, fused=True)
    size = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 24}
    processors = {"image_processor": {"size": size}, "video_processor": {"size": size | {"longest_edge": 32 * 32 * 60}}}
    return write_folder(folder, config | overrides, tensors, list(QWEN_TOKENS.values()), processors)


def language_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Those of the language model, as it calls them itself."""
    return {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}
