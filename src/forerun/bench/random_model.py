"""Models of real shapes with random weights: enough to measure time and bits without their checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.weights.checkpoint import Checkpoint

QWEN = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "max_position_embeddings": 8192, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "head_dim": 256,
    "global_head_dim": 512, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
    "hidden_size_per_layer_input": 0, "sliding_window": 1024,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma-4-E4B": GEMMA | {
        "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 10240, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
    },
    "Gemma-4-12B": GEMMA | {
        "model_type": "gemma4_unified_text", "hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "intermediate_size": 15360,
    },
    "Gemma-4-26B-A4B": GEMMA | {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "intermediate_size": 2112,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "Qwen3.5-4B": QWEN | {
        "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 9216, "tie_word_embeddings": True,
    },
    "Qwen3.5-35B-A3B": QWEN | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    },
    "Llama-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_theta": 500000.0,
    },
}  # fmt: skip


def assistant_shape(target: dict[str, Any], size: int, inner: int, heads: int, clusters: int = 0) -> dict[str, Any]:
    """The config of an assistant for a target: three layers with a window, one without."""
    kept = ("vocab_size", "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")
    text = {name: target[name] for name in (*kept, "attention_k_eq_v", "sliding_window") if name in target} | {
        "model_type": target["model_type"], "hidden_size": size, "intermediate_size": inner,
        "num_attention_heads": heads, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant", "text_config": text, "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": clusters > 0, "num_centroids": clusters or 2048, "centroid_intermediate_top_k": 32,
    }  # fmt: skip


ASSISTANTS = {
    "Gemma-4-E4B": assistant_shape(SHAPES["Gemma-4-E4B"], 256, 2048, 4, clusters=2048),
    "Gemma-4-12B": assistant_shape(SHAPES["Gemma-4-12B"], 1024, 8192, 16),
    "Gemma-4-26B-A4B": assistant_shape(SHAPES["Gemma-4-26B-A4B"], 1024, 8192, 16),
}


class RandomCheckpoint(Checkpoint):
    """Every tensor that is asked for exists, in the shape that is asked for; a name always gives the same numbers."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        super().__init__(Path("random weights"), config, [])
        self.device = device

    def names(self) -> set[str]:
        return {"mtp.fc.weight"} if self.config.get("mtp_num_hidden_layers") else set()

    def has(self, name: str) -> bool:
        """All but experts one by one, and an output matrix where the embedding may serve."""
        return "experts.0." not in name and name != "lm_head.weight"

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(f"{name} has whatever shape it is asked for in")

    def number_format(self, name: str) -> str:  # noqa: ARG002
        return "BF16"

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        if len(shape) == 1:  # norms: stored as factors by some, as what is added to one by others
            centre = 0.0 if str(self.config["model_type"]).startswith("qwen3_5") else 1.0
            return centre + 0.1 * torch.randn(shape, generator=generator, device=self.device)
        size = 0.5 if name.endswith("conv1d.weight") else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16) * size

    def integers(self, name: str) -> torch.Tensor:  # noqa: ARG002
        """The order of an assistant's tokens."""
        vocab = self.config["text_config"]["vocab_size"]
        return torch.randperm(vocab, generator=torch.Generator().manual_seed(0))

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """Nothing can be left over."""
