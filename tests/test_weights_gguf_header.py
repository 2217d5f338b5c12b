"""GGUF headers that lie: refused in one line, never a traceback, a hang or a giant allocation."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from tiny import tiny_gguf, tiny_model

from forerun.errors import ForerunError
from forerun.weights.find import find
from forerun.weights.gguf_config import config_from
from forerun.weights.gguf_header import read_header

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a GGUF file."""
    folder = tmp_path_factory.mktemp("source")
    return tiny_gguf(folder / "tiny.gguf", tiny_model(folder / "model", "llama", intermediate_size=128), kind="Q8_0")


COUNTS = 8  # offset of the two counts, behind magic and version


def _patched(source: Path, target: Path, offset: int, data: bytes) -> Path:
    content = bytearray(source.read_bytes())
    content[offset : offset + len(data)] = data
    target.write_bytes(content)
    return target


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, b"GGML"),
        (4, struct.pack("<I", 99)),
        (4, struct.pack(">I", 3)),
        (COUNTS, struct.pack("<Q", 2**63)),
        (COUNTS, struct.pack("<Q", 10**6)),
        (COUNTS + 8, struct.pack("<Q", 2**63)),
        (COUNTS + 16, struct.pack("<Q", 2**62)),
    ],
)
def test_absurd_counts_are_refused(tmp_path: Path, source: Path, offset: int, data: bytes) -> None:
    with pytest.raises(ForerunError) as caught:
        read_header(_patched(source, tmp_path / "a.gguf", offset, data))
    assert "\n" not in str(caught.value)


def test_tensors_beyond_the_end_are_refused(tmp_path: Path, source: Path) -> None:
    content = source.read_bytes()
    (tmp_path / "a.gguf").write_bytes(content[: len(content) - 4096])
    with pytest.raises(ForerunError, match=r"beyond the end|larger than the file"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize("offset", [2**20, 2**63])
def test_an_offset_beyond_the_end_is_refused(tmp_path: Path, source: Path, offset: int) -> None:
    name = b"blk.1.attn_q.weight"
    place = source.read_bytes().index(name) + len(name) + 4 + 2 * 8 + 4
    with pytest.raises(ForerunError, match=r"attn_q\.weight' lies beyond the end"):
        read_header(_patched(source, tmp_path / "a.gguf", place, struct.pack("<Q", offset)))


def test_tensors_that_share_bytes_are_refused(tmp_path: Path, source: Path) -> None:
    content = source.read_bytes()
    place = content.index(b"blk.1.attn_q.weight") + len(b"blk.1.attn_q.weight") + 4 + 2 * 8
    row = struct.pack("<I", gguf.GGMLQuantizationType.Q8_0)
    assert content[place : place + 4] == row
    start = min(tensor.offset for tensor in read_header(source).tensors)
    rows = (len(content) - start) // (2 * 34)  # as many rows of two blocks as the file has room for
    file = _patched(source, tmp_path / "a.gguf", place - 8, struct.pack("<QIQ", rows, 8, 0))
    with pytest.raises(ForerunError, match="larger than the file"):
        read_header(file)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF\x03\0\0\0", b"\x80\x04pickle"])
def test_stubs_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ForerunError):
        find(str(tmp_path / "a.gguf"))


def test_garbled_headers_never_raise_anything_else(tmp_path: Path, source: Path) -> None:
    content, chance = source.read_bytes(), random.Random(7)
    start = min(tensor.offset for tensor in read_header(source).tensors)
    file, refused = tmp_path / "a.gguf", 0
    for _ in range(200):
        broken = bytearray(content)
        for _ in range(chance.choice([1, 3])):
            broken[chance.randrange(start)] = chance.choice([0, 1, 127, 255])
        cut = chance.choice([len(broken), chance.randrange(start)])
        file.write_bytes(broken[:cut])
        try:
            header = read_header(file)
            config_from(header, "x", None)
        except ForerunError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 50 < refused < 200
