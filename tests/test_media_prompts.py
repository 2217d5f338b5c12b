"""Media inside prompts as the engine sees them: rows in the place of placeholders, who sees whom, where they stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, CPU, PAGE, VOCAB, decoder, engine, pool_for, request, run
from tiny_gemma import VARIANTS, WINDOW, random_gemma, save_gemma
from tiny_qwen import random_model, save_model
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.mtp import MtpDrafter
from forerun.kernels import prefill
from forerun.kernels.interface import AttentionSpec
from forerun.kernels.prefill import visible
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import MediaRun, PromptMedia
from forerun.models.layers.rows import make_pass

HIDDEN, TOKENS = 48, [(37 * n + 11) % VOCAB for n in range(50)]
PICTURES = ((3, 9), (14, 34), (40, 45))  # the second is longer than a chunk and than a window


def pictures(seed: int = 0, whole: bool = False) -> PromptMedia:
    noise = torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(seed))
    return PromptMedia([MediaRun(start, noise[start:stop], whole) for start, stop in PICTURES])


def merged(oracle: Any, media: PromptMedia) -> Tensor:
    """What the first layer of a transformers model reads, [1, tokens, hidden]."""
    x = oracle.get_input_embeddings()(torch.tensor([TOKENS])).clone()
    for each in media.runs:
        x[0, each.start : each.stop] = each.embeddings
    return x


def masks(whole: bool) -> dict[str, Tensor]:
    """By kind of layer who sees whom, pair by pair, as transformers wants it: added to scores [1, 1, rows, keys]."""
    count, group = len(TOKENS), [next((n for n, (a, b) in enumerate(PICTURES) if a <= t < b), -1) for t in range(50)]
    found = {"full_attention": torch.zeros(count, count), "sliding_attention": torch.zeros(count, count)}
    for row in range(count):
        for key in range(count):
            same = whole and group[row] == group[key] >= 0
            sees = {"full_attention": key <= row, "sliding_attention": (key <= row or same) and key > row - WINDOW}
            for kind in found:
                found[kind][row, key] = 0.0 if sees[kind] else float("-inf")
    return {kind: mask[None, None] for kind, mask in found.items()}


@torch.inference_mode()
def read(model: Decoder, media: PromptMedia | None, borders: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of the prompt read in stretches."""
    cache, parts, start = SequenceCache(pool_for(model)), [], 0
    cache.grow(len(TOKENS))
    for stop in [*borders, len(TOKENS)]:
        batch = make_pass([(cache, TOKENS[start:stop])], last_only=False, prefill=True, media=[media])
        parts.append(model.forward(batch).logits)
        cache.commit(stop - start)
        start = stop
    return torch.cat(parts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_rows_of_media_agree_with_transformers(
    variant: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "QUERIES", 7)  # so that rows that see each other are looked at in several stretches
    oracle, media = random_gemma(variant), pictures(whole=whole)
    x, more = merged(oracle, media), {}
    if variant == "E4B":  # what its layers read of tokens is that of padding where media are
        text = torch.tensor([TOKENS])
        for each in media.runs:
            text[0, each.start : each.stop] = 0
        more["per_layer_inputs"] = oracle.model.get_per_layer_inputs(text, x)
    expected = oracle(inputs_embeds=x, attention_mask=masks(whole), **more).logits[0]
    model = decoder(save_gemma(tmp_path, oracle), quantize=False)
    for borders in ([], [14, 34], [9, 38]):
        torch.testing.assert_close(read(model, media, borders), expected, atol=1e-4, rtol=0)
    assert (read(model, None, []) - expected).abs().max() > 0.1


@pytest.mark.parametrize("sparse", [False, True])
@torch.inference_mode()
def test_time_height_and_width_agree_with_transformers(sparse: bool, tmp_path: Path) -> None:
    """The constant that is added to all positions changes rounding alone."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}
    oracle, media = random_model(sparse, rope_parameters=rope), pictures()
    positions = torch.arange(len(TOKENS)).expand(3, -1).clone()
    for start, stop in PICTURES:  # a grid two wide, and what comes after it moves up
        count = stop - start
        grid = torch.arange(count)
        height, width = grid // 2, grid % 2
        base = int(positions[0, start])
        positions[:, start:stop] = base + torch.stack([torch.zeros_like(grid), height, width])
        positions[:, stop:] += int(positions[:, start:stop].max()) + 1 - int(positions[0, stop])
    expected = oracle(inputs_embeds=merged(oracle, media), position_ids=positions[:, None]).logits[0]
    shifted = replace(media, positions=positions + len(TOKENS) - 1 - int(positions[0, -1]))
    model = decoder(save_model(tmp_path, oracle), quantize=False)
    for borders in ([], [5, 20, 36]):
        torch.testing.assert_close(read(model, shifted, borders), expected, atol=1e-4, rtol=0)
    assert (read(model, media, []) - expected).abs().max() > 1e-3, "positions matter"


def test_who_sees_whom_in_a_chunk() -> None:
    runs = torch.tensor([-1] * 11 + [4, 4, 4, -1, 7, 7])
    for window in (0, 3, 5):
        for rows, keys in ((range(10, 17), range(6, 17)), (range(12, 14), range(8, 17))):
            found = visible(rows, keys, window, torch.device("cpu"), runs)
            for row in rows:
                for key in keys:
                    expected = (key <= row or int(runs[row]) == int(runs[key]) >= 0) and (
                        not window or key > row - window
                    )
                    assert bool(found[row - rows.start, key - keys.start]) is expected, (window, row, key)


def test_a_pass_never_ends_inside_rows_that_see_each_other() -> None:
    assert [pictures(whole=True).border(stop) for stop in (3, 4, 9, 16, 34, 48)] == [3, 9, 9, 34, 34, 48]
    assert [pictures().border(stop) for stop in (4, 16)] == [4, 16]
    with pytest.raises(AssertionError):
        pictures(whole=True).between(0, 20, CPU)


@pytest.mark.parametrize("variant", ["E4B", "31B"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_depend_on_media_and_not_on_drafts(variant: str, temperature: float, tmp_path: Path) -> None:
    model = decoder(save_gemma(tmp_path, random_gemma(variant)), quantize=False)
    asked = request(TOKENS, temperature=temperature, seed=3, max_tokens=30)
    wishes = [replace(asked, media=pictures(seed, variant == "31B")) for seed in (0, 1)] + [asked]
    alone = [run(engine(model), wish)[0].answer for wish in wishes]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    assert any(CHUNK * n % 50 in range(15, 34) for n in (1, 2)), "a chunk would end inside the second picture"
    for depth in (None, 1, 4):
        drafted = [replace(wish, draft="lookup", draft_tokens=depth) for wish in wishes]
        assert [s.answer for s in run(engine(model), *drafted)] == alone


def test_a_head_sees_media_one_row_earlier_and_goes_on_after_them() -> None:
    positions = torch.arange(10).expand(3, -1) + torch.tensor([[0], [100], [200]])
    first = MediaRun(0, torch.arange(2.0)[:, None])
    media = PromptMedia([first, MediaRun(6, torch.arange(10.0, 14.0)[:, None])], positions).one_earlier()
    rows = media.between(0, 12, CPU)
    assert rows.index is not None and rows.embeddings is not None and rows.positions is not None
    assert rows.index.tolist() == [0, 5, 6, 7, 8] and rows.embeddings[:, 0].tolist() == [1, 10, 11, 12, 13]
    assert rows.positions[1].tolist() == [*range(100, 110), 10, 11], "behind the prompt at their index"
    later = media.between(9, 12, CPU)
    assert later.index is None and later.positions is not None and later.positions[2].tolist() == [209, 10, 11]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_a_native_head_change_nothing(temperature: float, tmp_path: Path) -> None:
    model = decoder(save_model(tmp_path, random_model(False)), quantize=False)
    positions = torch.arange(len(TOKENS)).expand(3, -1) + torch.tensor([[0], [1], [2]])
    asked = request(TOKENS, temperature=temperature, seed=3, max_tokens=30)
    wishes = [replace(asked, media=replace(pictures(seed), positions=positions)) for seed in (0, 1)] + [asked]
    alone = [run(engine(model), wish)[0].answer for wish in wishes]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    for depth in (1, 3):
        machine, head = engine(model), model.native_head()
        assert head is not None
        own = PagePool([AttentionSpec(head.layout)], 100, PAGE, torch.float32, torch.device("cpu"))
        machine.drafters.by_name["mtp"] = MtpDrafter(head, own, VOCAB, CHUNK)
        drafted = [replace(wish, draft="mtp", draft_tokens=depth) for wish in wishes]
        answers = run(machine, *drafted)
        assert [s.answer for s in answers] == alone and all(s.counters.drafted for s in answers)
