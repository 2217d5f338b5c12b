"""The header of a GGUF file, read with bounds: whatever the file claims is checked against the file's size first."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from forerun.errors import ForerunError
from forerun.kernels.formats import GGUF_FORMATS

T = TypeVar("T")
Value = int | float | bool | str | tuple[int | float | bool, ...]

# Metadata value types: fixed-size ones by struct code; 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
SMALLEST_ENTRY = 13  # bytes: key length, type, one byte of value
SMALLEST_TENSOR = 32  # bytes: name length, number of dimensions, one dimension, type, offset
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; `shape` in torch's order (GGUF writes the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    kind: int  # gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    size: int  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """Metadata and tensor table. Arrays of strings (the vocabulary) are kept as their length; `strings` reads them."""

    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]
    arrays: Mapping[str, int] = field(default_factory=dict)  # of strings: where in the file the first one begins


class _Broken(Exception):
    """The file contradicts itself; the text says where."""


def header_of(file: Path) -> GgufHeader:
    """As `read_header`, which is asked again when the file changes."""
    try:
        status = file.stat()
    except OSError as error:
        raise ForerunError(f"cannot read {file}: {error.strerror}") from error
    return _read_once(file, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4)
def _read_once(file: Path, *identity: int) -> GgufHeader:  # noqa: ARG001
    return read_header(file)


def read_header(file: Path) -> GgufHeader:
    """Reads and checks the header; raises ForerunError for anything that is not a sound GGUF file."""
    return _read(file, _Reader.header)


def strings(file: Path, header: GgufHeader, key: str) -> list[str]:
    """The array of strings that the metadata has under a key; empty when there is none."""
    start, count = header.arrays.get(key), header.metadata.get(key)
    if start is None or not isinstance(count, int):
        return []
    return _read(file, lambda reader: reader.strings(start, count))


def _read(file: Path, read: Callable[[_Reader], T]) -> T:
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ForerunError(f"{file} is not a GGUF file (it does not start with 'GGUF')")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return read(_Reader(data))
    except (_Broken, struct.error, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, _Broken) else "it ends early or holds garbage"
        raise ForerunError(f"{file} is truncated or damaged ({reason}); download it again") from error
    except OSError as error:
        raise ForerunError(f"cannot read {file}: {error.strerror}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 4  # behind the magic
        self.arrays: dict[str, int] = {}

    def header(self) -> GgufHeader:
        (version,) = self.unpack("I")
        if version & 0xFFFF == 0:
            raise _Broken("big-endian files are not read")
        if version not in VERSIONS:
            raise _Broken(f"GGUF version {version} is not known")
        tensor_count, entry_count = self.unpack("QQ")
        self.expect(entry_count, SMALLEST_ENTRY, "metadata entries")
        metadata = self.metadata(entry_count)
        self.expect(tensor_count, SMALLEST_TENSOR, "tensors")
        return GgufHeader(metadata, self.tensors(tensor_count, _alignment(metadata)), self.arrays)

    def metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self.string()
            if key in metadata:
                raise _Broken(f"metadata key {key[:80]!r} twice")
            (kind,) = self.unpack("I")
            metadata[key] = self.value(kind, key)
        return metadata

    def value(self, kind: int, key: str) -> Value:
        if kind in SCALARS:
            value: Value = self.unpack(SCALARS[kind])[0]
            return value
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key)
        raise _Broken(f"unknown metadata type {kind}")

    def array(self, key: str) -> Value:
        kind, count = self.unpack("IQ")
        if kind in SCALARS:
            self.expect(count, struct.calcsize(SCALARS[kind]), "array elements")
            return self.unpack(f"{count}{SCALARS[kind]}")
        if kind != STRING:
            raise _Broken(f"an array of type {kind}")
        self.expect(count, 8, "strings")
        self.arrays[key] = self.at
        for _ in range(count):
            self.skip_string()
        return int(count)

    def strings(self, start: int, count: int) -> list[str]:
        self.at = start
        return [self.string() for _ in range(count)]

    def tensors(self, count: int, alignment: int) -> tuple[GgufTensor, ...]:
        rows = [self.tensor_row() for _ in range(count)]
        if len({name for name, *_ in rows}) != count:
            raise _Broken("a tensor name twice")
        start = -(-self.at // alignment) * alignment
        tensors = tuple(self.tensor(*row, start=start) for row in rows)
        # Tensors that share bytes could blow a small file up to any size.
        if sum(tensor.size for tensor in tensors) > self.size - start:
            raise _Broken("the tensors are larger than the file")
        return tensors

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (dimensions,) = self.unpack("I")
        if not 1 <= dimensions <= 4:
            raise _Broken(f"tensor {name[:80]!r} with {dimensions} dimensions")
        shape = self.unpack(f"{dimensions}Q")
        kind, offset = self.unpack("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, *, start: int) -> GgufTensor:
        block, block_bytes = _block_sizes(kind, name)
        if min(shape) < 1 or shape[-1] % block:
            raise _Broken(f"tensor {name[:80]!r} with the impossible shape {shape}")
        size = math.prod(shape) // block * block_bytes
        if start + offset + size > self.size:
            raise _Broken(f"tensor {name[:80]!r} lies beyond the end of the file")
        return GgufTensor(name, shape, kind, start + offset, size)

    def unpack(self, codes: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + codes, self.data, self.at)
        self.at += struct.calcsize("<" + codes)
        return values

    def string(self) -> str:
        start = self.at + 8
        self.skip_string()
        return self.data[start : self.at].decode("utf-8")

    def skip_string(self) -> None:
        (length,) = self.unpack("Q")
        self.expect(length, 1, "characters")
        self.at += length

    def expect(self, count: int, size: int, what: str) -> None:
        if count * size > self.size - self.at:
            raise _Broken(f"it claims {count} {what}, more than fit into the file")


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Broken(f"alignment {alignment}")
    return alignment


def _block_sizes(kind: int, name: str) -> tuple[int, int]:
    """Elements and bytes of one block of this type."""
    if (form := GGUF_FORMATS.get(kind)) is not None:
        return form.weights, form.bytes
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _Broken(f"tensor {name[:80]!r} has the unknown type {kind}") from None
    return int(elements), int(size)


def kind_name(kind: int) -> str:
    """What llama.cpp calls a type of tensors: "F32", "Q4_K", …"""
    if (form := GGUF_FORMATS.get(kind)) is not None:
        return form.name.upper()
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)
