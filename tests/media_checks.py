"""What every family's media are tested for, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch
from engines import CPU, VOCAB, Scripted, pool_for, request, run
from torch import Tensor
from transformers import AutoTokenizer

from forerun.cache.pages import SequenceCache
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.media.limits import MediaLimits
from forerun.media.loading import media_reader
from forerun.media.parts import MediaPrompt, MediaReader
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.weights.checkpoint import open_checkpoint

TEXT = [(37 * n + 11) % VOCAB for n in range(40)]
CHUNK = 16  # a picture of these tests is longer


def reader_of(folder: Path, **limits: int) -> MediaReader:
    """The reader of a model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    owner = cast(Any, RLock())
    reader = media_reader(open_checkpoint(folder), tokenizer, CPU, torch.float32, owner, MediaLimits(**limits))
    assert reader is not None
    return reader


@torch.inference_mode()
def last_logits(model: Decoder, prompt: MediaPrompt) -> Tensor:
    """[vocabulary]: what the first token of an answer is chosen from, the prompt read in chunks as the engine does."""
    cache, start, logits = SequenceCache(pool_for(model)), 0, torch.empty(0)
    cache.grow(len(prompt.ids))
    while start < len(prompt.ids):
        stop = prompt.media.border(min(len(prompt.ids), (start // CHUNK + 1) * CHUNK))
        batch = make_pass([(cache, prompt.ids[start:stop])], last_only=True, prompt=True, media=[prompt.media])
        logits = model.forward(batch).logits[-1].clone()
        cache.commit(stop - start)
        start = stop
    return logits


def asked(prompt: MediaPrompt, temperature: float = 0.0, draft: str = "off", depth: int | None = None) -> Request:
    """A request for an answer to a prompt with media."""
    own = request(prompt.ids, max_tokens=16, temperature=temperature, seed=5, draft=draft, draft_tokens=depth)
    return replace(own, media=prompt.media)


def check_drafts(machine: Engine, prompts: Sequence[MediaPrompt], drafts: Sequence[str]) -> None:
    """Answers are those of plain decoding, alone and beside each other and beside text."""
    for temperature in (0.0, 0.9):
        plain = [run(machine, asked(prompt, temperature))[0].answer for prompt in prompts]
        assert len({tuple(answer) for answer in plain}) == len(plain), "answers must depend on the media"
        text = request(TEXT, max_tokens=16, temperature=temperature, seed=5)
        alone = run(machine, text)[0].answer
        for draft in drafts:
            for depth in (1, 4):
                wishes = [asked(prompt, temperature, draft, depth) for prompt in prompts]
                assert run(machine, wishes[0])[0].answer == plain[0], (draft, depth, temperature)
                together = run(machine, *wishes, replace(text, draft=draft, draft_tokens=depth))
                assert [one.answer for one in together] == [*plain, alone], (draft, depth, temperature)
                assert draft == "lookup" or draft in together[0].counters.arms
        check_right_drafts(machine, prompts[0], plain[0], temperature)


def check_right_drafts(machine: Engine, prompt: MediaPrompt, plain: list[int], temperature: float) -> None:
    """Drafts that are right are accepted, those that are wrong are not."""

    def script(text: list[int], depth: int) -> list[int]:
        known = len(text) - len(prompt.ids)
        right = plain[known : known + depth]
        return right if known % 3 else [*right[:1], 77]

    before = machine.drafters.by_name["lookup"]
    machine.drafters.texts["lookup"] = Scripted(script)
    drafted = run(machine, asked(prompt, temperature, "lookup", 4))[0]
    machine.drafters.texts["lookup"] = before
    assert drafted.answer == plain
    assert drafted.counters.accepted >= len(plain) // 2
