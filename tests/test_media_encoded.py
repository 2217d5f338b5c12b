"""Media that come again: a chat brings its pictures with every turn, and nobody runs a tower to count tokens."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engines import CPU
from media_files import part

from forerun.errors import ForerunError
from forerun.media.encoded import Encoded, EncodedMedia
from forerun.media.expansion import Prepared, Stretch
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaOutOfMemory, MediaPart, PromptTooLong
from forerun.media.reader import LocalMediaReader

IMAGE, SOUND = 7, 8


class Family:
    """Rows are as many as a file has bytes, and say what they are; counts what is done."""

    kinds: Any = frozenset(("image", "audio"))

    def __init__(self) -> None:
        self.placeholders: Any = {IMAGE: "image", SOUND: "audio"}
        self.prepared: list[bytes] = []
        self.encoded: list[bytes] = []

    def prepare(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        if part.data == b"bad":
            raise ForerunError(f"{part.name} is damaged")
        self.prepared.append(part.data)
        token = {"image": IMAGE, "audio": SOUND}[part.kind]
        rows = len(part.data)
        return Prepared(part.kind, [1, *[token] * rows, 2], [Stretch(1, rows)], part)

    def load(self, kind: Kind) -> None:
        pass

    def encode(self, prepared: Prepared) -> torch.Tensor:
        self.encoded.append(prepared.inputs.data)
        values = torch.tensor(list(prepared.inputs.data), dtype=torch.float32)
        return (values + (1000 if prepared.kind == "audio" else 0))[:, None].expand(-1, 4)

    def whole(self, kind: Kind) -> bool:
        return False

    def positions(self, tokens: int, stretches: Any) -> None:
        return None


def reader(family: Family, **options: Any) -> LocalMediaReader:
    owner: Any = threading.RLock()
    return LocalMediaReader(family, owner, CPU, options.pop("limits", MediaLimits()), **options)  # type: ignore[arg-type]


def rows(prompt: Any) -> list[list[float]]:
    return [run.embeddings[:, 0].tolist() for run in prompt.media.runs]


def test_a_picture_is_encoded_once_for_all_turns() -> None:
    family = Family()
    own = reader(family)
    first = own.read([5, IMAGE], [part("image", b"cat", "one")])
    later = own.read([5, IMAGE, 6, IMAGE, 5], [part("image", b"cat", "two"), part("image", b"dogs", "three")])
    assert family.prepared == family.encoded == [b"cat", b"dogs"]
    assert first.ids == [5, 1, 7, 7, 7, 2] and later.ids == [5, 1, 7, 7, 7, 2, 6, 1, 7, 7, 7, 7, 2, 5]
    assert rows(later) == [*rows(first), [100, 111, 103, 115]]
    assert [run.start for run in later.media.runs] == [2, 8]


def test_one_that_comes_twice_in_a_prompt_is_encoded_once_and_stands_in_both_places() -> None:
    family = Family()
    twice = reader(family, remembered=0).read([IMAGE, 5, IMAGE], [part("image", b"cat")] * 2)
    assert family.prepared == family.encoded == [b"cat"]
    assert twice.ids == [1, 7, 7, 7, 2, 5, 1, 7, 7, 7, 2]
    assert rows(twice)[0] == rows(twice)[1] and [run.start for run in twice.media.runs] == [1, 7]


def test_the_same_bytes_as_something_else_are_something_else() -> None:
    family = Family()
    both = reader(family).read([IMAGE, SOUND], [part("image", b"cat"), part("audio", b"cat")])
    assert len(family.encoded) == 2 and rows(both)[1] == [value + 1000 for value in rows(both)[0]]


def test_counting_runs_no_tower_and_looks_once() -> None:
    family = Family()
    own = reader(family)
    ids, parts = [5, IMAGE, IMAGE], [part("image", b"cat"), part("image", b"dogs")]
    assert own.count(ids, parts) == own.count(ids, parts) == 1 + 5 + 6
    assert family.prepared == [b"cat", b"dogs"] and not family.encoded
    assert len(own.read(ids, parts).ids) == 12 and family.encoded == [b"cat", b"dogs"]
    before = list(family.prepared)
    assert own.count(ids, parts) == 12 and family.prepared == before, "what was read need not be looked at"


def test_limits_and_errors_are_those_of_a_file_that_is_new() -> None:
    family = Family()
    own = reader(family, context=12, limits=MediaLimits(soft_tokens=7))
    parts = [part("image", b"cat", "this one")] * 3
    for act in (own.count, own.read):
        act([IMAGE], parts[:1])
        with pytest.raises(ForerunError, match="more than 7 tokens"):
            act([IMAGE] * 3, parts)
        with pytest.raises(ForerunError, match="1 placeholders for media and 2 files"):
            act([IMAGE], parts[:2])
        with pytest.raises(ForerunError, match="that one is damaged"):
            act([IMAGE], [part("image", b"bad", "that one")])
        with pytest.raises(ForerunError, match="does not read video"):
            act([IMAGE], [part("video", b"cat")])
    with pytest.raises(PromptTooLong):
        own.read([IMAGE, *[5] * 8], parts[:1])
    assert own.count([IMAGE, *[5] * 8], parts[:1]) == 13, "who counts wants to know by how much it is too long"


def test_the_least_recently_used_go_first() -> None:
    def one(rows: int) -> Encoded:
        return Encoded("image", [7] * rows, [Stretch(0, rows)], torch.zeros(rows, 100))

    size = one(10).bytes
    assert size > 4000
    kept = EncodedMedia(3 * size)
    for name in "abc":
        kept.put(("image", name.encode()), one(10))
    assert kept.get(("image", b"a")) is not None
    kept.put(("image", b"d"), one(10))
    assert [kept.get(("image", name.encode())) is not None for name in "abcd"] == [True, False, True, True]
    kept.put(("image", b"e"), one(100))
    assert kept.get(("image", b"e")) is None and kept.get(("image", b"d")) is not None, "it alone is too large"
    kept.put(("image", b"d"), one(12))
    assert kept.bytes <= 3 * size, "what takes the place of another is not counted twice"
    kept.put(("image", b"d"), Encoded("image", [7] * 12, [Stretch(0, 12)], None))
    found = kept.get(("image", b"d"))
    assert found is not None and found.embeddings is not None, "rows are not lost to somebody who only counted"


def test_what_is_remembered_holds_no_more_than_its_rows() -> None:
    family = Family()
    large = torch.zeros(1000, 4)
    family.encode = lambda prepared: large[:3]  # type: ignore[method-assign]
    run = reader(family).read([IMAGE], [part("image", b"cat")]).media.runs[0]
    assert run.embeddings.untyped_storage().nbytes() == 3 * 4 * 4


def test_many_threads_with_the_same_few_pictures() -> None:
    family = Family()
    own = reader(family, remembered=2000)  # room for one or two of them
    files = [part("image", bytes([65 + n]) * (n + 1)) for n in range(6)]
    expected = [rows(own.read([IMAGE], [file])) for file in files]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: rows(own.read([5, IMAGE], [files[n % 6]])), range(300)))
    assert found == [expected[n % 6] for n in range(300)]


CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize("where", ["load", "prepare", "encode"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError(CPU_ALLOCATOR)])
def test_too_little_memory_is_said_as_that_and_the_tower_works_afterwards(where: str, error: Exception) -> None:
    family, seen = Family(), []
    own, act = reader(family), getattr(family, where)

    def fail(*_: Any) -> None:
        large = torch.zeros(10)
        seen.append(weakref.ref(large))
        setattr(family, where, act)
        raise error

    setattr(family, where, fail)
    with pytest.raises(MediaOutOfMemory, match="not enough free memory") as raised:
        own.read([IMAGE], [part("image", b"cat")])
    error.__traceback__ = None
    gc.collect()
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert seen[0]() is None, "what it had made is not kept by the error"
    assert rows(own.read([IMAGE], [part("image", b"cat")])) == [[99, 97, 116]]


def test_other_errors_of_a_tower_stay_what_they_are() -> None:
    family = Family()

    def fail(_: Prepared) -> Any:
        raise RuntimeError("shapes do not fit")

    family.encode = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes"):
        reader(family).read([IMAGE], [part("image", b"cat")])
