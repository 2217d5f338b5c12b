"""Gemma 4 in the engine: drafts change nothing, in windows and past them; tokens that stand for media never come."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from cpu_bodies import RoundsRows
from engines import CONTEXT, VOCAB, Scripted, decoder, engine, request, run
from safetensors.torch import load_file, save_file
from storm import Storm, random_visit
from test_models import load
from tiny_gemma import VARIANTS, WINDOW, tiny_gemma

from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.models.layers.decoder import Decoder
from forerun.weights.tokenizer import load_tokenizer

SHORT, LONG = [5, 6, 7, 8] * 2, [(37 * n + 11) % VOCAB for n in range(30)]


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_gemma(tmp_path_factory.mktemp("gemma"), request.param), quantize=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_nothing(model: Decoder, temperature: float) -> None:
    """Copies of the true answer with errors put in: whole rounds are accepted, and rolled back, on both sides of W."""
    asked = {"temperature": temperature, "seed": 3, "max_tokens": 40}
    plain = [sequence.answer for sequence in run(engine(model), *(request(p, **asked) for p in (SHORT, LONG)))]
    assert len(SHORT) < WINDOW < len(LONG) and len(plain[0]) == 40
    for depth in range(1, 7):

        def script(text: list[int], wanted: int, wrong: int = depth) -> list[int]:
            whole = SHORT + plain[0] if text[: len(SHORT)] == SHORT else LONG + plain[1]
            true = whole[len(text) : len(text) + wanted]
            return [token if (len(text) + at) % (wrong + 2) else (token + 1) % VOCAB for at, token in enumerate(true)]

        machine = engine(model)
        machine.drafters.texts["lookup"] = Scripted(script)
        wishes = [request(p, draft="lookup", draft_tokens=depth, **asked) for p in (SHORT, LONG)]
        found = run(machine, *wishes)
        assert [sequence.answer for sequence in found] == plain
        assert all(0 < s.counters.accepted < s.counters.drafted for s in found)


def test_an_end_token_inside_a_round(model: Decoder) -> None:
    (plain,) = run(engine(model), request(LONG, max_tokens=20))
    stop = frozenset({plain.answer[9]})
    (expected,) = run(engine(model), request(LONG, max_tokens=20, stop_ids=stop))
    machine = engine(model)
    machine.drafters.texts["lookup"] = Scripted(lambda text, wanted: (LONG + plain.answer)[len(text) :][:wanted])
    (found,) = run(machine, request(LONG, max_tokens=20, stop_ids=stop, draft="lookup", draft_tokens=6))
    assert (found.answer, found.finish_reason) == (expected.answer, "stop") and found.counters.accepted > 4


def test_a_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty requests with lives of their own; the same weights draft, so that many drafts are right."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)  # answers without a maximum must grow
    folder, dice = tiny_gemma(tmp_path, "26B-A4B"), random.Random(5)
    model, same = (decoder(folder, quantize=False) for _ in range(2))  # passes of the target alone are broken
    arms = ["off", "lookup", "model", "auto"]
    visits = [random_visit(dice, arms, ["propose", "sink", "close"], 12, arrives=number) for number in range(40)]
    storm = Storm(engine(model, draft_model=same, pages=14, context=64), visits)
    storm.engine.scheduler.max_sequences = 6
    storm.break_passes({40: RuntimeError("no pass")})
    storm.run()
    storm.compare(engine(model, context=64))
    assert storm.seen["accepted"] > 20 and storm.seen["parked"] and storm.seen["length"], storm.seen


@torch.inference_mode()
def test_what_the_checkpoint_rules_out_never_comes(tmp_path: Path) -> None:
    """Its list, and the tokens that stand for media, drafted and not."""
    open_to_all = decoder(tiny_gemma(tmp_path / "a", "31B"), quantize=False)
    free = run(engine(open_to_all), request(LONG, max_tokens=60, temperature=1.0, seed=1))[0].answer
    usual = sorted(set(free), key=free.count)
    folder = tiny_gemma(tmp_path / "b", "31B", nested=True, image_token_id=usual[-1], eoa_token_index=usual[-2])
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [usual[-3], 4000]}))
    ruled_out = set(usual[-3:])
    closed = decoder(folder, quantize=False)
    assert closed.never is not None and set(closed.never.tolist()) == ruled_out
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "logit_bias": dict.fromkeys(ruled_out, 50.0)}
    (plain,) = run(engine(closed), request(LONG, **asked))
    machine = engine(closed, draft_model=closed)
    found = run(machine, *(request(LONG, draft=arm, draft_tokens=4, **asked) for arm in ("model", "lookup")))
    assert all(sequence.answer == plain.answer for sequence in found) and ruled_out.isdisjoint(plain.answer)
    assert found[0].counters.accepted > 20, "who drafts knows it too"


def test_a_strange_list_is_refused(tmp_path: Path) -> None:
    folder = tiny_gemma(tmp_path, "31B")
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": "all"}))
    with pytest.raises(ForerunError, match="suppress_tokens"):
        decoder(folder, quantize=False)


def test_raw_text_begins_with_bos_and_chats_as_their_template_says(tmp_path: Path) -> None:
    from forerun.text.chat import encode_prompt

    tokenizer = load_tokenizer(tiny_gemma(tmp_path, "E4B"))
    bare = tokenizer("some text", add_special_tokens=False)["input_ids"]
    first = tokenizer.bos_token_id
    assert encode_prompt(tokenizer, "some text", raw=True) == [first, *bare]
    for count in (1, 2):  # text that begins with BOS has as many as it says
        assert encode_prompt(tokenizer, tokenizer.bos_token * count + "some text", raw=True) == [first] * count + bare
    assert encode_prompt(tokenizer, "hello").count(tokenizer.bos_token_id) == 2, "two turns; nothing was added"
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = load_tokenizer(tmp_path)
    assert encode_prompt(other, "some text", raw=True) == bare
    assert encode_prompt(other, other.bos_token * 2 + "some text", raw=True) == [first] * 2 + bare, "it adds none"


def test_the_context_of_the_tests_crosses_the_window() -> None:
    assert CONTEXT > 4 * WINDOW


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B"])
def test_a_converted_model_says_the_same(variant: str, tmp_path: Path) -> None:
    """In 8 bits on disk as when its rows are rounded; towers keep their bits, whatever their matrices are called."""
    folder = tiny_gemma(tmp_path / "whole", variant, nested=True)
    generator = torch.Generator().manual_seed(5)
    towers = {
        "model.embed_vision.embedding_projection.weight": torch.ones(3, 4),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.randn(8, 8, generator=generator),
        "model.audio_tower.layers.0.input_max": torch.tensor(2.5),
    }
    save_file(load_file(folder / "model.safetensors") | towers, folder / "model.safetensors", {"format": "pt"})
    done = convert(str(folder), tmp_path / "small", quantize="int8")
    stored = load_file(done.folder / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in towers.items())
    assert stored["model.language_model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert any("3 tensors that turn pictures or sound" in note for note in done.notes)
    assert done.bytes < 0.7 * (folder / "model.safetensors").stat().st_size
    models = load(folder, RoundsRows(True)), load(done.folder, CpuKernels(True))
    found = [run(engine(model), request(LONG))[0].answer for model in models]
    assert found[0] == found[1]
