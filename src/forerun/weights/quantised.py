"""Quantised safetensors as people publish them: matrices that are several tensors, or are stored in blocks.

MLX's affine groups and forerun's own blocks stay as they are stored. GPTQ, AWQ, compressed-tensors and 8-bit floats are
decoded when they are loaded, which `notes` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.formats import FORMATS, MLX_BITS, MLX_GROUPS
from forerun.kernels.matrix import Parts, Table, Weight, as_tensor
from forerun.kernels.parts import WeightPart
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.schemes import AWQ, BLOCKS, COMPRESSED, FP8, GPTQ, MLX, Scheme

FLOATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
FLOAT16_LARGEST = 65504.0
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of eight codes the column is
MLX_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight"),
    "model.norm.weight",
)
MTP_NORMS = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
MLX_TOWERS = ("vision_tower.", "audio_tower.", "embed_audio.", "embed_vision.", "vision_embedder.")


@dataclass(frozen=True, slots=True)
class Kept:
    """A matrix, or a stack of matrices, that is not stored as plain numbers."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]  # what it is stored in, the numbers themselves first
    read: Callable[[], Weight]


class QuantisedCheckpoint(Checkpoint):
    """A folder whose config.json names a way of quantising."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[Path], scheme: Scheme) -> None:
        super().__init__(path, config, files)
        self.scheme = scheme
        self._kept = dict(FINDERS[scheme.method](self))
        self._parts_of_others = {name for kept in self._kept.values() for name in kept.tensors} - self._kept.keys()

    def names(self) -> set[str]:
        return super().names() - self._parts_of_others | self._kept.keys()

    def has(self, name: str) -> bool:
        return name in self._kept or super().has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._kept[name].shape if name in self._kept else super().shape(name)

    def number_format(self, name: str) -> str:
        return self.scheme.name if name in self._kept else super().number_format(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._kept:
            return super().take(name, shape)
        return self._whole(name, shape).float()

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        self.matrices.add(name)
        return self._whole(name, shape) if name in self._kept else super().weight(name, shape)

    def table(self, name: str, shape: tuple[int, ...]) -> Table:
        if name not in self._kept:
            return super().table(name, shape)
        found = self._whole(name, shape)
        return found if isinstance(found, Parts) else as_tensor(found)

    def raw(self, name: str) -> Tensor:
        """What others quantised decoded, in float16, or in float32 where float16 would overflow."""
        if name not in self._kept or self.scheme.method == BLOCKS:
            return self.stored(name)
        values = self._kept[name].read().float()
        return values if float(values.abs().max()) > FLOAT16_LARGEST else values.half()

    def stored(self, name: str) -> Tensor:
        """A tensor of the file."""
        return super().raw(name)

    def same(self, name: str, other: str) -> bool:
        pair = [self._kept[each].tensors if each in self._kept else (each,) for each in (name, other)]
        if len(pair[0]) != len(pair[1]):
            return False
        stored = [(self.stored(first), self.stored(second)) for first, second in zip(*pair, strict=True)]
        return all(first.dtype == second.dtype and torch.equal(first, second) for first, second in stored)

    def edges(self, name: str, size: int) -> tuple[bytes, bytes]:
        flat = self.stored(self._kept[name].tensors[0] if name in self._kept else name).reshape(-1).view(torch.uint8)
        return flat[:size].numpy().tobytes(), flat[-size:].numpy().tobytes()

    def _whole(self, name: str, shape: tuple[int, ...]) -> Weight:
        self._check_shape(name, shape)
        self._taken.add(name)
        found = self._kept[name].read()
        if not isinstance(found, Parts):
            self._decoded.setdefault(f"they are stored with {self.scheme.name}", []).append(name)
        return found

    def floats_of(self, name: str) -> Tensor:
        """Scales and the like in float32, all of them numbers."""
        values = self.stored(name).float()
        if not bool(values.isfinite().all()):
            raise ForerunError(f"{self.path}: tensor {name} holds infinity or NaN; download it again")
        return values

    def wrong(self, name: str) -> ForerunError:
        """The tensors of a matrix contradict each other or config.json."""
        how = self.scheme.name
        return ForerunError(f"{self.path}: the tensors of {name} do not fit each other or config.json ({how})")


class MlxCheckpoint(QuantisedCheckpoint):
    """A folder that MLX wrote, quantised or not: other names, and for Qwen3.5 another axis and shifted norms."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[Path], scheme: Scheme) -> None:
        super().__init__(path, config, files, scheme)
        # Whichever converter moves the axis of the convolutions adds one to the norms.
        self._moved = any(_moved(super(MlxCheckpoint, self).shape(name)) for name in self.names() if _convolution(name))
        self._head_moved = self._moved and self._head_is_shifted()

    def _renamed(self, stored: str) -> str | None:
        return None if stored.startswith(MLX_TOWERS) else _hugging_face(stored)  # towers are in a layout of their own

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (shape[0], 1, shape[1]) if _convolution(name) and _moved(shape) else shape

    def stored(self, name: str) -> Tensor:
        tensor = super().stored(name)
        if _convolution(name) and _moved(tuple(tensor.shape)):
            return tensor.movedim(2, 1).contiguous()
        shifted = self._head_moved if name.startswith("mtp.") else self._moved
        if shifted and tensor.ndim == 1 and name.endswith((*MLX_NORMS, *MTP_NORMS)):
            return tensor.float() - 1
        return tensor

    def _head_is_shifted(self) -> bool:
        """Converters disagree about the norms of an MTP head; those of its layer lie about 0, or about 1 when shifted.

        A wrong guess costs drafts, never a token.
        """
        own = [name for name in self.names() if name.startswith("mtp.layers.") and name.endswith(MLX_NORMS)]
        means = [float(super(MlxCheckpoint, self).stored(name).float().mean()) for name in own]
        return bool(means) and sum(means) / len(means) > 0.5


def _hugging_face(name: str) -> str:
    """`language_model.model.layers.0.mlp.switch_mlp.up_proj.weight` → `model.layers.0.mlp.experts.up_proj`."""
    name = name.removeprefix("language_model.")
    for own, theirs in ((".mlp.switch_mlp.", ".mlp.experts."), (".experts.switch_glu.", ".experts.")):
        if own in name:
            name = name.replace(own, theirs).removesuffix(".weight")
    return name


def _convolution(name: str) -> bool:
    return name.endswith("linear_attn.conv1d.weight")


def _moved(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] != 1 and shape[2] == 1


def written_by_mlx(checkpoint: Checkpoint) -> bool:
    """By its names, or by the axis of its convolutions."""
    names = checkpoint.names()
    return any(name.startswith("language_model.model.") for name in names) or any(
        _moved(checkpoint.shape(name)) for name in names if _convolution(name)
    )


def find_mlx(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:
    names = Checkpoint.names(checkpoint)
    for scales in (name for name in names if name.endswith(".scales")):
        base = scales.removesuffix(".scales")
        name = base if base in names else base + ".weight"
        if name not in names or base + ".biases" not in names:
            raise checkpoint.wrong(base)
        tensors = (name, scales, base + ".biases")
        shapes = [Checkpoint.shape(checkpoint, each) for each in tensors]
        kinds = [Checkpoint.number_format(checkpoint, each) for each in tensors]
        bits, group = mlx_format(checkpoint.scheme, base)
        columns = shapes[1][-1] * group
        packed = (*shapes[1][:-1], columns * bits // 32)
        fits = shapes[0] == packed and shapes[1] == shapes[2] and len(packed) in (2, 3)
        known = bits in MLX_BITS and group in MLX_GROUPS
        if not fits or not known or kinds[0] != "U32" or kinds[1] not in ("F16", "BF16", "F32") or kinds[1] != kinds[2]:
            raise checkpoint.wrong(base)
        form = f"mlx{bits}_{group}"
        yield name, Kept((*shapes[0][:-1], columns), tensors, partial(read_mlx, checkpoint, tensors, form, columns))


def mlx_format(scheme: Scheme, base: str) -> tuple[int, int]:
    """Bits and group of a layer, which may have its own, under a name with or without what was put before it."""
    own = next(
        (
            Scheme(MLX, "", each)
            for path, each in scheme.settings.items()
            if isinstance(each, dict) and _hugging_face(path + ".weight").removesuffix(".weight") == base
        ),
        scheme,
    )
    return own.whole("bits", scheme.whole("bits")), own.whole("group_size", scheme.whole("group_size"))


def read_mlx(checkpoint: QuantisedCheckpoint, tensors: tuple[str, ...], form: str, columns: int) -> Weight:
    raw, *apart = (checkpoint.stored(name) for name in tensors)
    for name in tensors[1:]:
        checkpoint.floats_of(name)
    kind = FORMATS[FLOATS[apart[0].dtype]]
    scales, biases = (WeightPart(kind, bytes_of(each), tuple(each.shape)) for each in apart)
    part = WeightPart(FORMATS[form], bytes_of(raw), (*raw.shape[:-1], columns), None, scales, biases)
    return Parts((part,), apart[0].dtype)


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[..., bytes of a row], where the tensor lies."""
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().view(torch.uint8).numpy()
    return found


def find_blocks(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:
    form = FORMATS[str(checkpoint.scheme.settings["format"])]
    for name in Checkpoint.names(checkpoint):
        if Checkpoint.number_format(checkpoint, name) == "U8":
            *rows, size = Checkpoint.shape(checkpoint, name)
            if len(rows) not in (1, 2) or size % form.bytes:
                raise checkpoint.wrong(name)
            shape = (*rows, size // form.bytes * form.weights)
            yield name, Kept(shape, (name,), partial(read_blocks, checkpoint, name, form.name, shape))


def read_blocks(checkpoint: QuantisedCheckpoint, name: str, form: str, shape: tuple[int, ...]) -> Weight:
    raw = bytes_of(checkpoint.stored(name))
    if not FORMATS[form].finite(raw.reshape(-1, FORMATS[form].bytes)):
        raise ForerunError(f"{checkpoint.path}: tensor {name} holds infinity or NaN; download it again")
    return Parts((WeightPart(FORMATS[form], raw, shape),))


def words(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Codes of 32-bit words, the lowest bits first unless `places` says otherwise: [rows, words] → [rows, codes]."""
    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32) * bits
    return ((packed[..., None] >> shifts) & (1 << bits) - 1).flatten(-2)


def find_packed_words(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:
    """GPTQ and AWQ: codes [inputs, outputs], packed along inputs by the one and along outputs by the other."""
    names, method = Checkpoint.names(checkpoint), checkpoint.scheme.method
    each = 32 // checkpoint.scheme.whole("bits", 4)
    for packed in (name for name in names if name.endswith(".qweight")):
        base = packed.removesuffix(".qweight")
        tensors = tuple(base + part for part in (".qweight", ".scales", ".qzeros"))
        if not names.issuperset(tensors):
            raise checkpoint.wrong(base)
        (rows, columns), scales, zeros = (Checkpoint.shape(checkpoint, name) for name in tensors)
        inputs, outputs = (rows * each, columns) if method == GPTQ else (rows, columns * each)
        groups = scales[0] if scales else 0
        if scales != (groups, outputs) or zeros != (groups, outputs // each) or not groups or inputs % groups:
            raise checkpoint.wrong(base)
        own = tensors + ((base + ".g_idx",) if base + ".g_idx" in names else ())
        bias = base + ".bias"  # some writers give every matrix one
        idle = (bias,) if bias in names and not Checkpoint.raw(checkpoint, bias).any() else ()
        yield base + ".weight", Kept((outputs, inputs), own + idle, partial(read_packed_words, checkpoint, own, inputs))


def read_packed_words(checkpoint: QuantisedCheckpoint, tensors: tuple[str, ...], inputs: int) -> Tensor:
    """scale · (code − zero); GPTQ stores zeros less one, but for its second version, and may shuffle groups."""
    scheme, bits = checkpoint.scheme, checkpoint.scheme.whole("bits", 4)
    packed, zeros = checkpoint.stored(tensors[0]), checkpoint.stored(tensors[2])
    scales = checkpoint.floats_of(tensors[1])
    if scheme.method == AWQ:
        codes, zero = words(packed, 4, AWQ_PLACES), words(zeros, 4, AWQ_PLACES)
    else:
        codes = words(packed.T.contiguous(), bits).T
        zero = words(zeros, bits) + (scheme.settings.get("checkpoint_format", "gptq") == "gptq")
    group = torch.arange(inputs) // (inputs // len(scales))
    if len(tensors) > 3:
        group = checkpoint.stored(tensors[3]).long()
        if group.shape != (inputs,) or int(group.min()) < 0 or int(group.max()) >= len(scales):
            raise checkpoint.wrong(tensors[3])
    return (scales[group] * (codes - zero[group])).T.contiguous()


def find_compressed(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:
    names = Checkpoint.names(checkpoint)
    for scale in (name for name in names if name.endswith(".weight_scale")):
        name = scale.removesuffix("_scale")
        tensors = (name + "_packed" if name + "_packed" in names else name, scale)
        if tensors[0] not in names or name + "_g_idx" in names:
            raise checkpoint.wrong(name)
        shape = Checkpoint.shape(checkpoint, tensors[0])
        if tensors[0] != name:
            if name + "_shape" not in names:
                raise checkpoint.wrong(name)
            shape = tuple(Checkpoint.raw(checkpoint, name + "_shape").tolist())
        own = tensors + tuple(n for n in (f"{name}_{part}" for part in ("zero_point", "shape")) if n in names)
        idle = tuple(n for n in (name.removesuffix("weight") + "input_scale",) if n in names)
        yield name, Kept(shape, own + idle, partial(read_compressed, checkpoint, name, own, shape))


def read_compressed(
    checkpoint: QuantisedCheckpoint, name: str, tensors: tuple[str, ...], shape: tuple[int, ...]
) -> Tensor:
    """scale · (number − zero), one scale for a row or for a group of its columns."""
    stored, scales = checkpoint.stored(tensors[0]), checkpoint.floats_of(tensors[1])
    if tensors[0] == name:
        numbers = stored.float()
    else:
        groups = checkpoint.scheme.settings["config_groups"].values()
        bits = 8 if all(group["weights"].get("num_bits") == 8 for group in groups) else 4
        if stored.dtype != torch.int32 or len(shape) != 2 or stored.shape != (shape[0], -(-shape[1] * bits // 32)):
            raise checkpoint.wrong(name)
        numbers = words(stored, bits)[:, : shape[1]] - (1 << bits - 1)
        if f"{name}_zero_point" in tensors:
            zeros = checkpoint.stored(f"{name}_zero_point")
            if zeros.dtype == torch.int32:  # packed along rows
                zeros = words(zeros.T.contiguous(), bits).T[: shape[0]] - (1 << bits - 1)
            numbers = numbers - spread(zeros, numbers.shape, checkpoint, name)
    return numbers * spread(scales, numbers.shape, checkpoint, name)


def spread(factors: Tensor, shape: torch.Size, checkpoint: QuantisedCheckpoint, name: str) -> Tensor:
    """Factors of rows, of groups of columns, or of all, in the shape of what they multiply."""
    if factors.numel() == 1:
        return factors.reshape(1, 1)
    if factors.ndim != 2 or factors.shape[0] != shape[0] or shape[1] % factors.shape[1]:
        raise checkpoint.wrong(name)
    return factors.repeat_interleave(shape[1] // factors.shape[1], 1)


def find_fp8(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:
    names = Checkpoint.names(checkpoint)
    for name in names:
        if not Checkpoint.number_format(checkpoint, name).startswith("F8"):
            continue
        scale = next((each for each in (name + "_scale_inv", name + "_scale") if each in names), None)
        if scale is None:
            raise checkpoint.wrong(name)
        base = name.removesuffix("weight")
        idle = tuple(n for n in (base + "input_scale", base + "activation_scale") if n in names)
        shape = Checkpoint.shape(checkpoint, name)
        yield name, Kept(shape, (name, scale, *idle), partial(read_fp8, checkpoint, name, scale))


def read_fp8(checkpoint: QuantisedCheckpoint, name: str, scale: str) -> Tensor:
    """Each block of rows and columns has a scale; or there is one for each row, or one for all."""
    values, scales = checkpoint.floats_of(name), checkpoint.floats_of(scale)
    if scales.numel() == 1:
        return values * scales.reshape(())
    block = checkpoint.scheme.settings.get("weight_block_size") or [1, values.shape[-1]]
    sizes = [block] if isinstance(block, int) else list(block)
    expected = tuple(-(-size // step) for size, step in zip(values.shape[-2:], sizes, strict=False))
    if len(sizes) != 2 or scales.shape != (*values.shape[:-2], *expected):
        raise checkpoint.wrong(name)
    rows = scales.repeat_interleave(sizes[0], -2)[..., : values.shape[-2], :]
    return values * rows.repeat_interleave(sizes[1], -1)[..., : values.shape[-1]]


def nothing(checkpoint: QuantisedCheckpoint) -> Iterator[tuple[str, Kept]]:  # noqa: ARG001
    return iter(())


FINDERS: dict[str, Callable[[QuantisedCheckpoint], Iterator[tuple[str, Kept]]]] = {
    MLX: find_mlx,
    BLOCKS: find_blocks,
    GPTQ: find_packed_words,
    AWQ: find_packed_words,
    COMPRESSED: find_compressed,
    FP8: find_fp8,
}
