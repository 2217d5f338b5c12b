"""The tensors of a GGUF file, mapped from it, under Hugging Face's names and in the shapes of Hugging Face's files.

Matrices stay as they are stored; where Hugging Face has their rows in another order, a row map says so. Small tensors
that other files store as something else are computed when they are asked for.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.formats import GGUF_FORMATS, Bytes, Format
from forerun.kernels.matrix import Parts, Table, Weight
from forerun.kernels.parts import WeightPart
from forerun.weights.arrangement import Arrangement, Order
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_config import ROPE_FACTORS, huggingface_name
from forerun.weights.gguf_gemma import SHIFTED_NORMS, UNREAD
from forerun.weights.gguf_header import GgufHeader, GgufTensor, header_of, kind_name
from forerun.weights.gguf_qwen3_5 import QWEN3_5, qwen3_5_arrangement

UNUSED = (ROPE_FACTORS, *UNREAD)  # tensors that are not read
PIECE_VALUES = 2**24  # values decoded at a time, so that a large embedding does not need its size twice
FLOAT16_LARGEST = 65504.0
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class MappedFile:
    """The bytes of a file, read when they are touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb")
            self._map = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_READ)
            self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ForerunError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error

    def release(self) -> None:
        """What was read is the process's no longer; it comes again when it is touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def check(self) -> None:
        """Raises when the file became shorter: touching what is gone would end the process."""
        if os.fstat(self._stream.fileno()).st_size < len(self.bytes):
            raise ForerunError(f"{self.path} became shorter while it was in use: load the model again")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file, and where its values belong."""

    tensor: GgufTensor
    arrangement: Arrangement


class GgufCheckpoint(Checkpoint):
    """The tensors of one GGUF file."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        super().__init__(path, config, [])
        header = header_of(path)
        self._file = MappedFile(path)
        if any(tensor.offset + tensor.size > len(self._file.bytes) for tensor in header.tensors):
            raise ForerunError(f"{path} changed while it was being opened; try again")
        self._stored = dict(self._arranged(header))

    def _arranged(self, header: GgufHeader) -> Iterator[tuple[str, Stored]]:
        text = self.config.get("text_config", self.config)  # nested in those of assistants
        layers, architecture = text["num_hidden_layers"], str(header.metadata["general.architecture"])
        for tensor in header.tensors:
            if tensor.name not in UNUSED:
                name = huggingface_name(tensor.name, layers, str(self.path), architecture)
                yield name, Stored(tensor, arrangement_of(tensor, architecture, self.config, str(self.path)))

    def release(self) -> None:
        self._file.release()

    def names(self) -> set[str]:
        return set(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name).arrangement.shape

    def number_format(self, name: str) -> str:
        return kind_name(self._found(name).tensor.kind)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The values of a tensor in memory: floats as they are stored, blocks in float32."""
        self._check_shape(name, shape)
        self._taken.add(name)
        return self._values(self._found(name), torch.float32)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """As it is stored, rows in Hugging Face's order; decoded where that cannot be, which `notes` tells."""
        self.matrices.add(name)
        return self.table(name, shape)

    def table(self, name: str, shape: tuple[int, ...]) -> Table:
        self._check_shape(name, shape)
        self._taken.add(name)
        stored = self._found(name)
        tensor, arrangement = stored.tensor, stored.arrangement
        form = GGUF_FORMATS.get(tensor.kind)
        if len(shape) < 2 or arrangement.change is not None:
            return self._values(stored, torch.float32)
        if form is None:
            return self._decoded_matrix(name, f"there is no product with {self.number_format(name)}")
        raw = self._bytes(tensor, form).reshape(*tensor.shape[:-1], -1)
        if arrangement.columns is not None:
            blocks = arrangement.columns.reshape(-1, form.weights)
            if (blocks - blocks[:, :1] != np.arange(form.weights)).any() or (blocks[:, 0] % form.weights).any():
                return self._decoded_matrix(name, "llama.cpp has their columns in other blocks")
            apart = raw.reshape(len(raw), -1, form.bytes)
            raw = apart[:, blocks[:, 0] // form.weights].reshape(raw.shape)
        part = WeightPart(form, raw, arrangement.shape, arrangement.rows, check=self._file.check)
        return Parts((part,), DTYPES.get(form.name, torch.float32))

    def _decoded_matrix(self, name: str, reason: str) -> Tensor:
        self._decoded.setdefault(reason, []).append(name)
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """As `take`, blocks in float16, or in float32 where float16 would overflow."""
        return self._values(self._found(name), torch.float16)

    def same(self, name: str, other: str) -> bool:
        first, second = self._found(name), self._found(other)
        if first.tensor.kind != second.tensor.kind or first.arrangement.shape != second.arrangement.shape:
            return False
        self._file.check()
        return np.array_equal(self._all_bytes(first.tensor), self._all_bytes(second.tensor))

    def edges(self, name: str, size: int) -> tuple[bytes, bytes]:
        self._file.check()
        stored = self._all_bytes(self._found(name).tensor)
        return stored[:size].tobytes(), stored[-size:].tobytes()

    def _found(self, name: str) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise ForerunError(f"{self.path}: tensor {name} is missing; the weights do not fit the metadata")
        return stored

    def _all_bytes(self, tensor: GgufTensor) -> Bytes:
        return self._file.bytes[tensor.offset : tensor.offset + tensor.size]

    def _bytes(self, tensor: GgufTensor, form: Format) -> Bytes:
        """The blocks of a tensor [blocks, bytes], all of whose values are finite."""
        self._file.check()
        raw = self._all_bytes(tensor).reshape(-1, form.bytes)
        if not form.finite(raw):
            raise self._damaged(tensor)
        return raw

    def _damaged(self, tensor: GgufTensor) -> ForerunError:
        return ForerunError(f"{self.path} is damaged: tensor {tensor.name} holds infinity or NaN; download it again")

    def _values(self, stored: Stored, blocks: torch.dtype) -> Tensor:
        """Decoded values, where Hugging Face has them; `blocks`: the precision of those that are stored in blocks."""
        tensor, arrangement = stored.tensor, stored.arrangement
        form = GGUF_FORMATS.get(tensor.kind)
        if form is not None and form.floats is not None:
            raw = torch.from_numpy(self._bytes(tensor, form).copy()).view(DTYPES[form.name])
            values = raw.reshape(tensor.shape)
        else:
            values = self._all_decoded(tensor, form, blocks)
        if arrangement.rows is not None:
            values = values[torch.from_numpy(arrangement.rows)]
        if arrangement.columns is not None:
            values = values[:, torch.from_numpy(arrangement.columns)]
        if arrangement.change is not None:
            values = arrangement.change(values)
        return values.reshape(arrangement.shape).contiguous()

    def _all_decoded(self, tensor: GgufTensor, form: Format | None, dtype: torch.dtype) -> Tensor:
        """All in float32 when one value does not fit into float16."""
        values = torch.empty(math.prod(tensor.shape) // tensor.shape[-1], tensor.shape[-1], dtype=dtype)
        start = 0
        for piece in self._decoded_pieces(tensor, form):
            if dtype == torch.float16 and float(piece.abs().max()) > FLOAT16_LARGEST:
                return self._all_decoded(tensor, form, torch.float32)
            values[start : start + len(piece)] = piece
            start += len(piece)
        return values.view(tensor.shape)

    def _decoded_pieces(self, tensor: GgufTensor, form: Format | None) -> Iterator[Tensor]:
        """Rows in float32, some at a time."""
        width = tensor.shape[-1]
        step = max(1, PIECE_VALUES // width)
        if form is not None:
            raw = self._bytes(tensor, form).reshape(-1, form.row_bytes(width))
            for start in range(0, len(raw), step):
                rows = raw[start : start + step]
                yield torch.from_numpy(form.unpack(rows.reshape(-1, form.bytes)).reshape(len(rows), width))
            return
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        self._file.check()
        kind = GGMLQuantizationType(tensor.kind)
        raw = self._all_bytes(tensor).reshape(-1, tensor.size * width // math.prod(tensor.shape))
        for start in range(0, len(raw), step):
            try:
                with np.errstate(all="ignore"):
                    piece = torch.from_numpy(dequantize(raw[start : start + step], kind))
            except NotImplementedError as error:
                raise ForerunError(
                    f"{self.path}: tensor {tensor.name} has type {kind.name}, which gguf cannot read"
                ) from error
            if not bool(piece.isfinite().all()):
                raise self._damaged(tensor)
            yield piece


def arrangement_of(tensor: GgufTensor, architecture: str, config: dict[str, Any], where: str) -> Arrangement:
    """Llama files store the rows of q and k with the two halves of each head interleaved.

    Norms of Gemma 3 are stored as factors; Hugging Face's files have what is added to one. Qwen3.5 has its own rules.
    """
    if architecture in QWEN3_5:
        return qwen3_5_arrangement(tensor, config, where)
    part = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
    if architecture == SHIFTED_NORMS and part.endswith("norm"):
        return Arrangement(tensor.shape, change=lambda values: values - 1)
    if architecture != "llama" or part not in ("attn_q", "attn_k"):
        return Arrangement(tensor.shape)
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    rows, head_dim = tensor.shape[0], config["head_dim"]
    if rows != heads * head_dim:
        raise ForerunError(
            f"{where}: tensor {tensor.name} has {rows} rows, expected {heads} heads of {head_dim}; the file is damaged"
        )
    order: Order = np.arange(rows).reshape(heads, head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)
    return Arrangement(tensor.shape, rows=order)
