"""A pass that was written down once gives the bits of the same operations run at once, for any rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import decoder, pool_for
from test_gemma3 import write as write_gemma3
from tiny import tiny_model
from tiny_gemma import tiny_gemma
from tiny_qwen import tiny_qwen

from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.cpu.ops import CpuKernels
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output, Target, make_pass
from forerun.models.recorded import target_of

PROMPTS = [[(step * n + 11) % 250 for n in range(length)] for step, length in ((37, 29), (91, 12), (17, 1))]
FAMILIES: dict[str, Callable[[Path], object]] = {
    "llama": lambda folder: tiny_model(folder, "llama", hidden_size=72, intermediate_size=88, head_dim=12),
    "qwen2, with biases": lambda folder: tiny_model(folder, "qwen2"),
    "qwen3, with norms of heads": lambda folder: tiny_model(folder, "qwen3"),
    "gemma3, with windows and caps": lambda folder: write_gemma3(folder, "new"),
    "gemma4, with inputs of layers and shared keys": lambda folder: tiny_gemma(folder, "E4B"),
    "gemma4, with experts": lambda folder: tiny_gemma(folder, "26B-A4B"),
    "gemma4, with keys as values": lambda folder: tiny_gemma(folder, "31B"),
    "qwen3_5, with recurrent layers": lambda folder: tiny_qwen(folder),
    "qwen3_5, with experts": lambda folder: tiny_qwen(folder, sparse=True),
}


def recorded_on(model: Decoder, pool: PagePool) -> Target:
    """What runs its passes as the engine has it."""
    return target_of(model, pool.layers, len(pool.groups))


def walk(target: Target, pool: PagePool) -> list[Output]:
    """Prompts one after another, then decode passes of one sequence, of all, and of different widths, features too."""
    found = []
    caches = [SequenceCache(pool) for _ in PROMPTS]
    for cache, prompt in zip(caches, PROMPTS, strict=True):
        cache.grow(80)
        for start in range(0, len(prompt), 20):
            piece = prompt[start : start + 20]
            found.append(target.forward(make_pass([(cache, piece)], last_only=True, prompt=True, features=True)))
            cache.commit(len(piece))
    for widths, features in (((1,), False), ((1, 1, 1), True), ((3, 1, 5), True), ((7,), False), ((6, 7, 8), False)):
        work = [(cache, list(range(40, 40 + width))) for cache, width in zip(caches, widths, strict=False)]
        found.append(target.forward(make_pass(work, last_only=False, features=features)))
        for cache, width in zip(caches, widths, strict=False):
            cache.commit((width + 1) // 2)
    for cache in caches:
        cache.release()
    return found


def check(model: Decoder) -> None:
    with torch.inference_mode():
        pools = [pool_for(model) for _ in range(2)]
        now, later = walk(model, pools[0]), walk(recorded_on(model, pools[1]), pools[1])
    for mine, theirs in zip(now, later, strict=True):
        assert mine.logits.isfinite().all() and torch.equal(mine.logits, theirs.logits)
        assert (mine.features is None) == (theirs.features is None)
        assert mine.features is None or (theirs.features is not None and torch.equal(mine.features, theirs.features))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    FAMILIES[request.param](folder)
    return decoder(folder, quantize=True)


def test_every_family(model: Decoder) -> None:
    check(model)


def rows_in_pieces(model: Decoder, size: int, beside: int) -> torch.Tensor:
    """Logits of all rows of a prompt that is read in pieces, with rows of other sequences in every pass."""
    pool = pool_for(model)
    target, tokens = recorded_on(model, pool), [(37 * n + 11) % 250 for n in range(70)]
    cache, others = SequenceCache(pool), [SequenceCache(pool) for _ in range(beside)]
    for each in (cache, *others):
        each.grow(80)
    found = []
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        work = [(other, [start % 200 + number]) for number, other in enumerate(others)]
        place = len(others) // 2  # the prompt's rows stand between those of the others
        work.insert(place, (cache, piece))
        found.append(target.forward(make_pass(work, last_only=False)).logits[place : place + len(piece)])
        cache.commit(len(piece))
        for other in others:
            other.commit(1)
    return torch.cat(found)


def test_a_row_of_a_prompt_is_a_row_like_any_other(model: Decoder) -> None:
    """Whole, in pieces, one by one, beside other sequences: there is one kind of row."""
    with torch.inference_mode():
        whole = rows_in_pieces(model, 70, 0)
        for size, beside in ((1, 0), (7, 0), (64, 0), (16, 3), (1, 5), (64, 5)):
            assert torch.equal(rows_in_pieces(model, size, beside), whole), (size, beside)


def test_hidden_states_of_layers_that_drafters_look_at(tmp_path: Path) -> None:
    """Other layers after the first pass, as when a head joins."""
    model = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=4), quantize=True)
    pools = [pool_for(model) for _ in range(2)]
    recorded = recorded_on(model, pools[0])
    with torch.inference_mode():
        walk(recorded, pools[0])
        model.taps = (1, 3)
        now, later = walk(model, pools[1]), walk(recorded, pools[0])
    for mine, theirs in zip(now, later, strict=True):
        assert torch.equal(mine.logits, theirs.logits)
        if mine.features is not None and theirs.features is not None:
            assert mine.features.shape[1] == 3 * 64 and torch.equal(mine.features, theirs.features)


def test_tokens_that_are_never_chosen(tmp_path: Path) -> None:
    model = decoder(tiny_model(tmp_path, "llama"), quantize=True)
    model.rule_out([3, 299])
    pool = pool_for(model)
    with torch.inference_mode():
        for output in walk(recorded_on(model, pool), pool):
            assert (output.logits[:, [3, 299]] == -torch.inf).all() and output.logits[:, 4:299].isfinite().all()


def test_a_recording_is_made_once_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaying asks for no operation: methods of the kernels are gone by then."""
    model = decoder(tiny_model(tmp_path, "llama"), quantize=True)
    pool = pool_for(model)
    target = recorded_on(model, pool)
    with torch.inference_mode():
        first = walk(target, pool)
        for name in ("linear", "_multiply", "rms_norm", "attention", "rotate_and_store", "_run", "_loop"):
            monkeypatch.setattr(CpuKernels, name, None)
        again = walk(target, pool)
    assert all(torch.equal(mine.logits, theirs.logits) for mine, theirs in zip(first, again, strict=True))
