"""The tensors of a GGUF file as safetensors: dequantised once, in pieces, under Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError
from forerun.progress import Progress
from forerun.weights.folder import save_in_files
from forerun.weights.gguf_config import ROPE_FACTORS, huggingface_name
from forerun.weights.gguf_gemma import SHIFTED_NORMS, UNREAD
from forerun.weights.gguf_header import GgufHeader, GgufTensor
from forerun.weights.gguf_qwen3_5 import QWEN3_5, qwen3_5_tensor

if TYPE_CHECKING:
    import numpy as np
    import torch

UNUSED = (ROPE_FACTORS, *UNREAD)  # tensors that are not written
PIECE_VALUES = 2**24  # values dequantised at a time, so that a large embedding does not need its size twice
FLOAT16_LARGEST = 65504.0


def write_tensors(header: GgufHeader, source: Path, folder: Path, config: dict[str, Any], progress: Progress) -> None:
    """Writes every tensor of the file (but the rope factors, which the config states) into `folder`."""
    text = config.get("text_config", config)  # nested in those of assistants
    layers, architecture = text["num_hidden_layers"], str(header.metadata["general.architecture"])
    kept = [tensor for tensor in header.tensors if tensor.name not in UNUSED]
    names = [huggingface_name(tensor.name, layers, str(source), architecture) for tensor in kept]

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for tensor, name in zip(kept, names, strict=True):
            yield name, _rows_in_order(_read(tensor, source), tensor.name, architecture, config, str(source))
            task.advance(tensor.size)

    with progress.task("converting GGUF", total=sum(tensor.size for tensor in kept)) as task:
        save_in_files(converted(), folder)


def converted_bytes(header: GgufHeader) -> int:
    """How much room the converted tensors need, about."""
    return sum(max(tensor.size, 2 * math.prod(tensor.shape)) for tensor in header.tensors)


def read_rope_factors(header: GgufHeader, source: Path) -> list[float] | None:
    """The content of rope_freqs.weight, which Llama 3.1 files carry in place of their rope scaling."""
    tensor = next((tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS), None)
    return None if tensor is None else _read(tensor, source).float().flatten().tolist()


def _read(tensor: GgufTensor, source: Path) -> torch.Tensor:
    """The values of a tensor, all of them finite."""
    values = _values(tensor, source)
    if not bool(values.isfinite().all()):
        raise ForerunError(f"{source} is damaged: tensor {tensor.name} holds infinity or NaN; download it again")
    return values


def _values(tensor: GgufTensor, source: Path) -> torch.Tensor:
    """Floats as stored; quantised values as float16, or float32 where float16 would overflow."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType

    raw = np.memmap(source, dtype=np.uint8, mode="r", offset=tensor.offset, shape=tensor.size)
    kind = GGMLQuantizationType(tensor.kind)
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(raw.view(np.int16).reshape(tensor.shape).copy()).view(torch.bfloat16)
    if kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        dtype = np.float16 if kind == GGMLQuantizationType.F16 else np.float32
        return torch.from_numpy(raw.view(dtype).reshape(tensor.shape).copy())
    blocks = raw.reshape(-1, tensor.size * tensor.shape[-1] // math.prod(tensor.shape))  # [rows, bytes of a row]
    return torch.from_numpy(_dequantised(blocks, kind, tensor, source, np.float16).reshape(tensor.shape))


def _dequantised(
    blocks: np.ndarray[Any, Any], kind: Any, tensor: GgufTensor, source: Path, dtype: type[np.floating[Any]]
) -> np.ndarray[Any, Any]:
    """[rows, bytes] -> [rows, values], all of them in float32 when one does not fit into float16."""
    import numpy as np
    from gguf.quants import dequantize

    width = tensor.shape[-1]
    values = np.empty((len(blocks), width), dtype)
    step = max(1, PIECE_VALUES // width)
    for start in range(0, len(blocks), step):
        try:
            with np.errstate(all="ignore"):
                piece = dequantize(blocks[start : start + step], kind)
        except NotImplementedError as error:
            raise ForerunError(
                f"{source}: tensor {tensor.name} has type {kind.name}, which gguf cannot read"
            ) from error
        if dtype == np.float16 and float(np.abs(piece).max()) > FLOAT16_LARGEST:
            return _dequantised(blocks, kind, tensor, source, np.float32)
        values[start : start + step] = piece
    return values


def _rows_in_order(
    tensor: torch.Tensor, name: str, architecture: str, config: dict[str, Any], where: str
) -> torch.Tensor:
    """Llama files store the rows of q and k with the two halves of each head interleaved; this puts them back.

    Norms of Gemma 3 are stored as factors; Hugging Face's files have what is added to one. Qwen3.5 has its own rules.
    """
    import torch

    if architecture in QWEN3_5:
        return qwen3_5_tensor(tensor, name, config, where)
    part = name.split(".")[-2]
    if architecture == SHIFTED_NORMS and part.endswith("norm"):
        return tensor - 1
    if architecture != "llama" or part not in ("attn_q", "attn_k"):
        return tensor
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    rows, head_dim = tensor.shape[0], config["head_dim"]
    if rows != heads * head_dim:
        raise ForerunError(
            f"{where}: tensor {name} has {rows} rows, expected {heads} heads of {head_dim}; the file is damaged"
        )
    order = torch.arange(rows).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)
    return tensor[order].contiguous()
