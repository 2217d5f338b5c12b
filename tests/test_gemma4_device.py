"""Gemma 4 in rounds of a device: the kernels of a GPU, or Triton's interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from device_engines import DEVICE, SLOW, TOKENS, Knowing, answers, device_engine
from engines import VOCAB, request, run
from tiny_gemma import FULL, SLIDING, random_gemma, save_gemma

from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.cuda import CudaKernels
from forerun.models.families import build
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
    pytest.mark.skipif(find_spec("transformers.models.gemma4") is None, reason="transformers does not know the family"),
]
FEW = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 9, "vocab_size": 290}
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "vocab_size": 290,
    "vocab_size_per_layer_input": 290,
}
CASES = {"E4B": SHARED, "26B-A4B": FEW, "12B": FEW}
PROMPT = [(7 * n + 3) % VOCAB for n in range(38)]


@pytest.fixture(params=["E4B", pytest.param("26B-A4B", marks=SLOW), "12B"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_gemma(tmp_path, random_gemma(request.param, **CASES[request.param]))


@torch.inference_mode()
def test_logits_agree_with_transformers(folder: Path, fewer_programs: None) -> None:
    """A prompt, then a wide pass over a border of pages beside a step of another sequence."""
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    model = build(open_checkpoint(folder), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(model.config, 12, 16, torch.float32, DEVICE, on_device=True)
    model.rope.reserve(64)
    caches = [SequenceCache(pool) for _ in range(2)]
    for cache, length in zip(caches, (30, 20), strict=True):
        cache.grow(length + 5)
        found = model.forward(make_pass([(cache, PROMPT[:length])], last_only=False, prompt=True)).logits
        cache.commit(length)
        torch.testing.assert_close(found.cpu(), expected[:length], atol=1e-4, rtol=0)
    work = [(caches[0], PROMPT[30:35]), (caches[1], PROMPT[20:21])]
    found = model.forward(make_pass(work, last_only=False)).logits.cpu()
    torch.testing.assert_close(found[:5], expected[30:35], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[5:6], expected[20:21], atol=1e-4, rtol=0)


@SLOW
def test_rounds_give_what_plain_decoding_gives(folder: Path, fewer_programs: None) -> None:
    asked = [request(p, max_tokens=TOKENS) for p in ([5, 6] * 6, PROMPT)]
    engine = device_engine(folder, None, drafter=Knowing())
    alone = [answers(engine, wish)[0] for wish in asked]
    assert answers(engine, *asked) == alone
    texts = [[*wish.prompt, *answer] for wish, answer in zip(asked, alone, strict=True)]
    engine = device_engine(folder, None, drafter=Knowing(*texts), chunk=11)
    sequences = run(engine, *(request(wish.prompt, max_tokens=TOKENS, draft="mtp", draft_tokens=3) for wish in asked))
    assert [sequence.answer for sequence in sequences] == alone
    assert all(sequence.counters.accepted for sequence in sequences)


TEXT = [45, 76, 73, 5, 80, 72]


@SLOW
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_assistant_drafts_inside_rounds(temperature: float, gemma_pair: Path, fewer_programs: None) -> None:
    """The text is that of plain decoding; edits take part."""
    asked = {"max_tokens": 2 * TOKENS, "temperature": temperature, "seed": 2, "logit_bias": {17: 1.0}}
    prompts = [TEXT, [81] * 20]
    target, assistant = gemma_pair / "target", gemma_pair / "assistant"
    plain = answers(device_engine(target, None), *(request(p, **asked) for p in prompts))
    engine = device_engine(target, None, assistant=assistant)
    sequences = run(engine, *(request(p, draft="assistant", draft_tokens=3, **asked) for p in prompts))
    assert [sequence.answer for sequence in sequences] == plain
    assert sum(sequence.counters.accepted for sequence in sequences) > 4


@SLOW
def test_the_host_decides_for_one_of_two(gemma_pair: Path, fewer_programs: None) -> None:
    """An assistant drafts for both; who chooses makes no difference to either."""
    target, assistant = gemma_pair / "target", gemma_pair / "assistant"
    asked = [
        request(TEXT, max_tokens=TOKENS, draft="assistant", draft_tokens=2),
        replace(request([81] * 20, max_tokens=TOKENS, temperature=0.9, top_k=280, seed=4), logprobs=1),
    ]
    plain = [replace(wish, draft="off", draft_tokens=None, logprobs=None) for wish in asked]
    expected = answers(device_engine(target, None), *plain)
    engine = device_engine(target, None, assistant=assistant)
    drafted = replace(asked[1], draft="assistant", draft_tokens=2)
    assert answers(engine, asked[0], drafted) == expected
