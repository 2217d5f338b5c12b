"""The prefix cache where rounds run on a device (or in the interpreter), and where prompts are read in chunks there."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_engines import PAGE, SLOW, TOKENS, device_engine, tiny_folder, tiny_head, tiny_hybrid
from engines import VOCAB, request, run

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.kernels.interface import CHUNK_ROWS

TEXT = [(37 * n * n + 11 * n) % (VOCAB - 4) + 4 for n in range(200)]


def ask(length: int, draft: str = "off", tokens: int = TOKENS) -> Request:
    return request(TEXT[:length], max_tokens=tokens, draft=draft, temperature=0.8, seed=4)


def compare(warm: Engine, cold: Engine, wish: Request) -> int:
    """Tokens that were found; the answers are equal."""
    (mine,), (alone,) = run(warm, wish), run(cold, wish)
    assert mine.answer == alone.answer and not alone.counters.cached
    assert warm.pool.free == warm.pool.count
    return mine.counters.cached


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_warm_equals_cold(draft: str, tmp_path: Path) -> None:
    """A text that lies in pages already takes those, also while its next round is queued."""
    folder = tiny_folder(tmp_path)
    warm, cold = device_engine(folder, None, prefix_cache=True), device_engine(folder, None)
    assert warm.pool.prefix.grain == PAGE
    for length, cached in ((40, 0), (40, 32), (32, 16), (16, 0)):
        assert compare(warm, cold, ask(length, draft, tokens=4)) == cached


@SLOW
def test_a_head_drafts_from_where_a_hit_ends(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    head = tiny_head(tmp_path / "head", folder)
    warm, cold = (device_engine(folder, head, prefix_cache=on) for on in (True, False))
    for length, cached in ((40, 0), (40, 32), (33, 32), (16, 0)):
        assert compare(warm, cold, ask(length, "mtp", tokens=9)) == cached


@SLOW
def test_recurrent_prompts_are_found_in_whole_chunks(tmp_path: Path) -> None:
    """A hit ends at a border of chunks that has a state; answers, whose rows are of another kind, are not found."""
    folder = tiny_hybrid(tmp_path)
    warm, cold = (device_engine(folder, None, prefix_cache=on) for on in (True, False))
    assert warm.pool.prefix.grain == CHUNK_ROWS
    for length, cached in (
        (60, 0),
        (60, 0),
        (130, 0),
        (130, 128),
        (140, 128),
        (129, 128),
        (128, 64),
        (70, 64),
    ):
        assert compare(warm, cold, ask(length)) == cached, length
