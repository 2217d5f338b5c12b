"""The prefix cache between runs: its pages in a file, which is mapped when a model loads and written at the end.

The file is a safetensors file: its metadata say what it belongs to, `index` is JSON that describes the pages, and
`contents` are their bytes. A page comes into the pool when a prompt has its text, and its bytes are compared with
their hash before. The file is replaced as a whole, so that processes which have it mapped keep the one they opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceContents
from forerun.cache.prefix import FOUND_SHARE, CachedPage, PrefixIndex
from forerun.cache.recurrent import SlotContents
from forerun.errors import ForerunError, first_line

if TYPE_CHECKING:
    from forerun.cache.pages import PagePool

log = logging.getLogger("forerun")

FORMAT = "forerun prefix cache"
VERSION = 1  # of the layout of the file
# How every file begins behind the eight bytes that safetensors begins with.
BEGINNING = json.dumps({"__metadata__": {"format": FORMAT}}).removesuffix("}}").encode()
# Bytes of pages and states, at most: some ten thousand tokens of a small model. All of it is written anew at the end
# of a run, which takes about a second.
LARGEST = 1 << 30
ALIGNED = 64  # bytes at multiples of which tensors begin
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)}


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """What the bits of pages depend on."""

    model: Mapping[str, str]  # what a user chooses: a file with other ones belongs to something else
    versions: Mapping[str, str]  # a file with other ones is of no use any more


class DamagedFile(Exception):
    """The file cannot be used."""


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Tensors that lie one behind the other in the file, and the hash of their bytes."""

    start: int
    digest: str
    tensors: list[tuple[str, list[int]]]  # number format and shape of each

    @property
    def size(self) -> int:
        return sum(aligned(_bytes(kind, shape)) for kind, shape in self.tensors)


@dataclass(slots=True, eq=False)
class StoredPage:
    """A page in the file. Nothing of it is in memory but what was read lately, which the system may drop."""

    mapped: MappedPages
    page: FileExtent  # keys and values by page group, then the features of its last row, if they were there
    groups: int
    recurrent: FileExtent | None  # the state after its last row
    decoded: bool | None  # of a device's state
    _checked: bool = False
    _state_checked: bool = False

    def is_sound(self) -> bool:
        """Does it have the bytes that were written?"""
        self._checked = self._checked or self.mapped.is_sound(self.page)
        return self._checked

    def contents(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by page group."""
        tensors = self.mapped.tensors(self.page)
        return [(tensors[at], tensors[at + 1]) for at in range(0, 2 * self.groups, 2)]

    def edge(self, device: torch.device) -> Tensor | None:
        """Features of its last row, in memory."""
        rest = self.mapped.tensors(self.page)[2 * self.groups :]
        return rest[0].to(device, copy=True) if rest else None

    def state(self) -> SlotContents | None:
        """Recurrent state after its last row; a damaged one is none."""
        if self.recurrent is None:
            return None
        if not self._state_checked and not self.mapped.is_sound(self.recurrent):
            self.recurrent = None
            return None
        self._state_checked = True
        *parts, kept = self.mapped.tensors(self.recurrent)
        layers = [(parts[at], parts[at + 1], parts[at + 2]) for at in range(0, len(parts), 3)]
        return SlotContents(layers, kept) if self.decoded is None else DeviceContents(layers, kept, self.decoded)


@dataclass(slots=True, eq=False)
class MappedPages:
    """The bytes of all pages, mapped."""

    path: Path
    data: Tensor  # [bytes] uint8
    _warned: bool = False

    def is_sound(self, stretch: FileExtent) -> bool:
        """Are the bytes those that were written? The first time they are not, a line says so."""
        found = hashlib.sha256(self.bytes(stretch)).hexdigest() == stretch.digest
        if not found and not self._warned:
            self._warned = True
            log.warning("%s is damaged: texts whose pages are hurt are read again", self.path)
        return found

    def bytes(self, stretch: FileExtent) -> memoryview:
        """As they are in the file."""
        return self.data[stretch.start : stretch.start + stretch.size].numpy().data

    def tensors(self, stretch: FileExtent) -> list[Tensor]:
        """Views of the file."""
        found, at = [], stretch.start
        for kind, shape in stretch.tensors:
            size = _bytes(kind, shape)
            found.append(self.data[at : at + size].view(DTYPES[kind]).view(shape))
            at += aligned(size)
        return found


@dataclass(slots=True, eq=False)
class PrefixFile:
    """Where the prefix cache of a model is kept between runs."""

    path: Path
    facts: PrefixFacts
    largest: int = LARGEST

    def read(self, pool: PagePool) -> None:
        """Let the index find what an earlier run left. Nothing may have been published yet.

        A file of another model is refused, and so is one that is something else: neither may be lost. What cannot be
        used is left out with a line, and will be replaced.
        """
        if not holds_pages(self.path):
            return
        try:
            header = read_header(self.path)
            self._refuse_other(header)
            other = first_difference(header.versions, self.facts.versions)
            if other is not None:
                log.warning("%s is not used and will be replaced: it was written with another %s", self.path, other)
                return
            pool.prefix.restore(read_pages(self.path, header, len(pool.groups)))
        except DamagedFile as error:
            log.warning("%s is damaged, is not used and will be replaced: %s", self.path, error)

    def _refuse_other(self, header: Header) -> None:
        other = first_difference(header.model, self.facts.model)
        if other is not None:
            raise ForerunError(
                f"{self.path} keeps the prefix cache of something else, with another {other}: give another file"
            )

    def write(self, pool: PagePool) -> None:
        """Replace the file by what the index has. Where that fails a line says so, and the file stays as it was."""
        try:
            pages = choose(pool.prefix, self.largest)
            if pages:
                self._refuse_lost()
                replace_file(self.path, pages, pool.prefix, self.facts)
        except (ForerunError, DamagedFile) as error:
            log.warning("the prefix cache was not written: %s", error)
        except OSError as error:
            log.warning("the prefix cache was not written to %s: %s", self.path, error.strerror or first_line(error))

    def _refuse_lost(self) -> None:
        """Another process may have written another model's pages since."""
        if holds_pages(self.path):
            with suppress(DamagedFile):
                self._refuse_other(read_header(self.path))


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a file."""

    model: dict[str, str]
    versions: dict[str, str]
    digest: str  # of the index


def check_place(path: Path) -> Path:
    """Where a file with this name is or will be. What can be known to be wrong before a model loads is refused."""
    place = Path(os.path.realpath(path))
    if place.is_dir():
        raise ForerunError(f"{path} is a folder: name a file in it to keep the prefix cache in")
    if not place.parent.is_dir():
        raise ForerunError(f"{path}: there is no folder {place.parent}: make it, or name another file")
    holds_pages(place)
    return place


def holds_pages(path: Path) -> bool:
    """Is it a file of ours? False where there is none, or an empty one; anything else is refused."""
    try:
        if path.exists() and not path.is_file():
            raise ForerunError(f"{path} is no file: name another one to keep the prefix cache in")
        with path.open("rb") as stream:
            found = stream.read(8 + len(BEGINNING))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ForerunError(f"cannot read {path}: {error.strerror}") from error
    if found and found[8:] != BEGINNING:
        raise ForerunError(f"{path} is no file that forerun keeps a prefix cache in: name another one, or remove it")
    return bool(found)


def first_difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """The name of a fact that is not the same."""
    return next((name for name in {**wanted, **found} if found.get(name) != wanted.get(name)), None)


# ---- reading


def read_header(path: Path) -> Header:
    """The metadata, without a look at the rest."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
        if metadata["sum"] != _sum(metadata):
            raise DamagedFile("its header is not what was written")
        if metadata["version"] != str(VERSION):
            return Header(json.loads(metadata["model"]), {"format": metadata["version"]}, "")
        return Header(json.loads(metadata["model"]), json.loads(metadata["versions"]), metadata["index"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFile(first_line(error)) from error


def read_pages(path: Path, header: Header, groups: int) -> list[CachedPage]:
    """Its pages, the most valuable first; of their contents nothing is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            index, data = opened.get_tensor("index"), opened.get_tensor("contents")
        text = index.numpy().tobytes()
        if hashlib.sha256(text).hexdigest() != header.digest:
            raise DamagedFile("its index is not what was written")
        mapped, pages = MappedPages(path, data), list[CachedPage]()
        for facts in json.loads(text):
            stretch, state = stretch_of(facts["page"]), facts["state"]
            recurrent = None if state is None else stretch_of(state)
            for one in (stretch, recurrent):
                if one is not None and one.start + one.size > len(data):
                    raise DamagedFile("it ends too early")
            pages.append(
                CachedPage(
                    key=bytes.fromhex(facts["key"]),
                    parent=None if facts["parent"] is None else pages[facts["parent"]],
                    tokens=tuple(facts["tokens"]),
                    media=bytes.fromhex(facts["media"]),
                    pages=[],
                    found=facts["found"],
                    entries=frozenset(facts["entries"]),
                    stored=StoredPage(mapped, stretch, groups, recurrent, facts["decoded"]),
                )
            )
    except (SafetensorError, OSError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFile(first_line(error)) from error
    return pages


def stretch_of(facts: Mapping[str, Any]) -> FileExtent:
    """As `asdict` wrote it."""
    return FileExtent(facts["start"], facts["digest"], [(kind, shape) for kind, shape in facts["tensors"]])


def aligned(size: int) -> int:
    """The next place where a tensor may begin."""
    return -(-size // ALIGNED) * ALIGNED


def _bytes(kind: str, shape: Sequence[int]) -> int:
    count = DTYPES[kind].itemsize
    for length in shape:
        count *= length
    return count


# ---- writing


def choose(index: PrefixIndex, largest: int) -> list[CachedPage]:
    """Pages to keep in so many bytes, each behind its parent. Pages that were found go first, but for a share that is
    left to new ones; among each the most recently used go first.
    """
    pages = index.by_worth()
    size_of = {page: _page_bytes(index, page) for page in pages}
    found, once = [page for page in pages if page.found], [page for page in pages if not page.found]
    kept, room = dict[CachedPage, None](), largest
    for some, left in ((found, int((1 - FOUND_SHARE) * largest)), (once, 0), (found, 0)):
        for page in some:
            line = _line(page, kept)
            wanted = sum(size_of.get(one, largest + 1) for one in line)  # one that is not listed is never found
            if wanted > largest:
                continue
            if room - wanted < left:
                break
            kept.update(dict.fromkeys(line))
            room -= wanted
    return list(kept)


def _line(page: CachedPage, kept: Mapping[CachedPage, None]) -> list[CachedPage]:
    """The page behind those before it that are not kept yet."""
    line, one = list[CachedPage](), page
    while one not in kept:
        line.append(one)
        if one.parent is None:
            break
        one = one.parent
    return line[::-1]


def _page_bytes(index: PrefixIndex, page: CachedPage) -> int:
    if page.stored is not None:
        size = page.stored.page.size
    else:
        size = sum(aligned(size) for group in index.groups for size in group.page_bytes)
        size += 0 if page.edge is None else aligned(page.edge.nbytes)
    if page.state is not None:
        return size + sum(aligned(tensor.nbytes) for tensor in _state_tensors(page.state))
    return size + (0 if page.stored is None or page.stored.recurrent is None else page.stored.recurrent.size)


def _state_tensors(state: SlotContents) -> list[Tensor]:
    return [*(tensor for layer in state.layers for tensor in layer), state.kept]


def replace_file(path: Path, pages: Sequence[CachedPage], index: PrefixIndex, facts: PrefixFacts) -> None:
    """Write the pages, for the user's eyes alone: they hold what was asked. Nobody ever sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            write_pages(stream, pages, index, facts)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def write_pages(stream: BinaryIO, pages: Sequence[CachedPage], index: PrefixIndex, facts: PrefixFacts) -> None:
    """Page after page, so that no more than one is copied at a time; the header last, when all hashes are known."""
    room = aligned(len(_header(facts, "0" * 64, LARGEST**2, LARGEST**2)))
    stream.write(bytes(room))
    writer, numbers = PageWriter(stream), dict[CachedPage, int]()
    described = []
    for page in pages:
        stretch, (state, decoded) = writer.page(page, index), writer.state(page)
        described.append(
            {
                "key": page.key.hex(),
                "parent": None if page.parent is None else numbers[page.parent],
                "tokens": page.tokens,
                "media": page.media.hex(),
                "found": page.found,
                "entries": sorted(page.entries),
                "page": _facts_of(stretch),
                "state": None if state is None else _facts_of(state),
                "decoded": decoded,
            }
        )
        numbers[page] = len(numbers)
    text = json.dumps(described, separators=(",", ":")).encode()
    stream.write(text)
    header = _header(facts, hashlib.sha256(text).hexdigest(), writer.at, len(text))
    stream.seek(0)
    stream.write((room - 8).to_bytes(8, "little") + header[8:].ljust(room - 8))


def _header(facts: PrefixFacts, digest: str, contents: int, index: int) -> bytes:
    """Eight bytes for its length, then JSON."""
    about = {"model": json.dumps(dict(facts.model)), "versions": json.dumps(dict(facts.versions)), "index": digest}
    metadata = {"format": FORMAT, "version": str(VERSION)} | about
    tensors = {
        "__metadata__": metadata | {"sum": _sum(metadata)},
        "contents": {"dtype": "U8", "shape": [contents], "data_offsets": [0, contents]},
        "index": {"dtype": "U8", "shape": [index], "data_offsets": [contents, contents + index]},
    }
    return bytes(8) + json.dumps(tensors).encode()


def _sum(metadata: Mapping[str, str]) -> str:
    """Tells a damaged header from that of another model."""
    rest = sorted((name, value) for name, value in metadata.items() if name != "sum")
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def _facts_of(stretch: FileExtent) -> dict[str, Any]:
    return {"start": stretch.start, "digest": stretch.digest, "tensors": stretch.tensors}


class PageWriter:
    """Puts tensors one behind the other."""

    def __init__(self, stream: BinaryIO) -> None:
        self.at, self._stream = 0, stream

    def page(self, page: CachedPage, index: PrefixIndex) -> FileExtent:
        """What a page holds, from wherever it is."""
        if page.stored is not None:
            return self._again(page.stored.mapped, page.stored.page)
        both = page.copies
        if page.resident:
            both = [group.copy_one(number) for group, number in zip(index.groups, page.pages, strict=True)]
        return self._tensors([*(one for pair in both for one in pair), *([] if page.edge is None else [page.edge])])

    def state(self, page: CachedPage) -> tuple[FileExtent | None, bool | None]:
        """The recurrent state that stays with a page; of a device's whether it was decoding."""
        if page.state is not None:
            decoded = page.state.decoded if isinstance(page.state, DeviceContents) else None
            return self._tensors(_state_tensors(page.state)), decoded
        if page.stored is not None and page.stored.recurrent is not None:
            return self._again(page.stored.mapped, page.stored.recurrent), page.stored.decoded
        return None, None

    def _tensors(self, tensors: Iterable[Tensor]) -> FileExtent:
        start, total, described = self.at, hashlib.sha256(), list[tuple[str, list[int]]]()
        for tensor in tensors:
            # numpy's copy: torch's would wake a second thread for every page.
            data = tensor.detach().cpu().view(torch.uint8).numpy().tobytes()
            data += bytes(aligned(len(data)) - len(data))
            total.update(data)
            self._stream.write(data)
            self.at += len(data)
            described.append((str(tensor.dtype), list(tensor.shape)))
        return FileExtent(start, total.hexdigest(), described)

    def _again(self, mapped: MappedPages, stretch: FileExtent) -> FileExtent:
        """What came from a file goes to the next with the hash it had, so that damage does not pass for sound."""
        start = self.at
        self._stream.write(mapped.bytes(stretch))
        self.at += stretch.size
        return FileExtent(start, stretch.digest, stretch.tensors)
