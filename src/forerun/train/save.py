"""The head's files: weights, config, figures and a model card.

The layer's matrices are rounded to 8 bits with a scale per row, as loading for a CPU would do it anyway. The matrices
before the layer have a few large values, beside which 8 bits would leave the others coarse: they stay in bfloat16.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.draft.head import DRAFT_VOCABULARY
from forerun.kernels.matrix import Rounded, Weight, as_tensor, round_to_int8
from forerun.train.head import LAYER, Head
from forerun.weights.checkpoint import SCALE
from forerun.weights.fingerprint import fingerprint
from forerun.weights.folder import save_tensors
from forerun.weights.heads import FORMAT, VERSION, WEIGHTS, shape_of


def save_head(out: Path, head: Head, draft_vocab: Tensor | None, report: dict[str, Any], card: str) -> None:
    """Write the folder; the config comes last, so that a folder with one is complete."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.weights.items():
        stored = _stored(name, tensor)
        if isinstance(stored, Rounded):
            tensors |= {name: stored.values.cpu(), name + SCALE: stored.scale.cpu()}
        else:
            tensors[name] = as_tensor(stored).cpu().contiguous()
    if draft_vocab is not None:
        tensors[DRAFT_VOCABULARY] = draft_vocab.to("cpu", torch.int64).sort().values.contiguous()
    beside = out / (WEIGHTS + ".part")
    save_tensors(tensors, beside)
    os.replace(beside, out / WEIGHTS)
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card, encoding="utf-8", errors="replace")  # files may have any name
    (out / "config.json").write_text(json.dumps(head_config(head), indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def round_as_saved(head: Head) -> None:
    """Give a head the values that its file will have."""
    for name, tensor in head.weights.items():
        tensor.copy_(_stored(name, tensor).float())


def _stored(name: str, tensor: Tensor) -> Weight:
    tensor = tensor.detach()
    if name.startswith(LAYER) and tensor.ndim == 2:
        return Rounded(*round_to_int8(tensor))
    return tensor.bfloat16()


def head_config(head: Head) -> dict[str, Any]:
    """What a loader must know: whose head it is, which layers it taps, and the shape of its layer."""
    checkpoint, config, attention = head.target.checkpoint, head.config, head.target.attention
    target = {"hash": fingerprint(checkpoint)} | asdict(shape_of(checkpoint))
    layer = {
        "num_attention_heads": config.layout.heads,
        "num_key_value_heads": config.layout.kv_heads,
        "head_dim": config.layout.size,
        "intermediate_size": head.intermediate,
        "rms_norm_eps": config.eps,
        "rope_parameters": attention.rope.parameters(),
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "attention_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "mlp_bias": head.target.feed_forward.bias,
        "head_norms": attention.head_norms,
    }
    return {"format": FORMAT, "version": VERSION, "target": target, "taps": list(head.taps), "layer": layer}
