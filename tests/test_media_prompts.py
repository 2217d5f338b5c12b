"""Media inside prompts as the engine sees them: rows in the place of placeholders, who sees whom, where they stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, CPU, VOCAB, decoder, engine, pool_for, request, run
from tiny_gemma import VARIANTS, WINDOW, random_gemma, save_gemma
from tiny_qwen import random_model, save_model
from torch import Tensor

from forerun.cache.pages import SequenceCache
from forerun.draft.mtp import MtpDrafter
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
        batch = make_pass([(cache, TOKENS[start:stop])], last_only=False, prompt=True, media=[media])
        parts.append(model.forward(batch).logits)
        cache.commit(stop - start)
        start = stop
    return torch.cat(parts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_rows_of_media_agree_with_transformers(variant: str, whole: bool, tmp_path: Path) -> None:
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


@torch.inference_mode()
def test_a_head_sees_media_where_they_stand(tmp_path: Path) -> None:
    """An entry of its own is made of the token at its position: of a row of the picture there."""
    model = decoder(save_model(tmp_path, random_model(False)), quantize=False)
    head = model.native_head()
    assert head is not None
    drafter, found = MtpDrafter(head, VOCAB), []
    for media in (None, pictures(0), pictures(1)):
        pool = pool_for(model, 100, {"mtp": drafter.specs})
        drafter.attach(pool)
        cache, layer = SequenceCache(pool), pool.parts["mtp"][0]
        cache.grow(len(TOKENS))
        drafter.follow(make_pass([(cache, TOKENS)], last_only=True, media=[media]), torch.ones(len(TOKENS), HIDDEN))
        found.append(layer.keys[cache.tables[layer.group].long()].permute(0, 3, 1, 2).flatten(0, 1)[: len(TOKENS)])
    inside = torch.tensor([any(a <= at < b for a, b in PICTURES) for at in range(len(TOKENS))])
    for one, other in ((0, 1), (1, 2)):
        assert torch.equal((found[one] != found[other]).flatten(1).any(1), inside)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_a_native_head_change_nothing(temperature: float, tmp_path: Path) -> None:
    model = decoder(save_model(tmp_path, random_model(False)), quantize=False)
    positions = torch.arange(len(TOKENS)).expand(3, -1) + torch.tensor([[0], [1], [2]])
    asked = request(TOKENS, temperature=temperature, seed=3, max_tokens=30)
    wishes = [replace(asked, media=replace(pictures(seed), positions=positions)) for seed in (0, 1)] + [asked]
    alone = [run(engine(model), wish)[0].answer for wish in wishes]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    for depth in (1, 3):
        head = model.native_head()
        assert head is not None
        machine = engine(model, beside=[MtpDrafter(head, VOCAB)])
        drafted = [replace(wish, draft="mtp", draft_tokens=depth) for wish in wishes]
        answers = run(machine, *drafted)
        assert [s.answer for s in answers] == alone and all(s.counters.drafted for s in answers)
