"""The command line and the Python API on a tiny model: what users type, and what bad input gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_gguf, tiny_model

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel

JSON_KEYS = {
    "text", "tokens", "finish_reason", "prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted", "seconds",
    "tokens_per_second", "draft", "guaranteed", "seed", "arms", "tokens_per_round", "accepted_per_position",
    "seconds_saved",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return forerun.load(str(folder), draft_model=str(folder))


def test_json_has_every_key_and_arms_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for draft in ("off", "lookup", "model"):
        extra = ["--draft-model", str(folder)] if draft == "model" else []
        command = ["generate", "-m", str(folder), "-p", "hello there", "-n", "24", "--temp", "0.7", "--seed", "11"]
        assert main([*command, "--draft", draft, "--json", *extra]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        assert set(answer) >= JSON_KEYS
        assert answer["tokens"] == answers[0]["tokens"] and answer["text"] == answers[0]["text"]
        assert answer["guaranteed"] is True and answer["seed"] == 11
        assert set(answer["seconds"]) == {"load", "prefill", "decode", "draft", "verify"}
    assert answers[2]["accepted"] > 0


def test_text_and_the_closing_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(folder), "-p", "hello", "-n", "8", "--raw"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "8 tokens" in err and "tok/s" in err and "guaranteed" in err
    assert main(["generate", "-m", str(folder), "-p", "hello", "-n", "8", "--raw", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_check_prints_the_probe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "llama" in out and "lookup" in out and "16" in out


def test_a_gguf_file_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    tiny_gguf(file, folder)
    loaded = [forerun.load(str(each), quantize="none") for each in (file, folder)]
    found, wanted = (forerun.generate(model, "hello", max_tokens=12).tokens for model in loaded)
    assert found == wanted


def with_config(folder: Path, target: Path, **changes: object) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def truncated(folder: Path, target: Path) -> Path:
    broken = with_config(folder, target)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return broken


def pickle_only(folder: Path, target: Path) -> Path:
    broken = with_config(folder, target)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    return broken


def test_a_file_that_becomes_shorter_ends_the_request(folder: Path, tmp_path: Path) -> None:
    """Reading a map beyond the end of its file would end the process."""
    file = tiny_gguf(tmp_path / "tiny.gguf", folder)
    model, whole = forerun.load(str(file)), file.read_bytes()
    expected = forerun.generate(model, "hello", max_tokens=4).tokens
    os.truncate(file, len(whole) // 2)
    with pytest.raises(ForerunError, match="became shorter while it was in use"):
        forerun.generate(model, "some other words", max_tokens=4)  # rows that were read before are still known
    file.write_bytes(whole)
    assert forerun.generate(model, "hello", max_tokens=4).tokens == expected


def lying_gguf(folder: Path, target: Path) -> Path:
    target.mkdir()
    file = target / "model.gguf"
    tiny_gguf(file, folder)
    data = bytearray(file.read_bytes())
    data[8:16] = (1 << 60).to_bytes(8, "little")  # claims 2⁶⁰ tensors
    file.write_bytes(data)
    return file


BROKEN_MODELS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "truncated": (truncated, "safetensors"),
    "pickle": (pickle_only, "safetensors"),
    "auto_map": (lambda f, t: with_config(f, t, auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "bitsandbytes": (
        lambda f, t: with_config(f, t, quantization_config={"quant_method": "bitsandbytes"}),
        "bitsandbytes",
    ),
    "unknown family": (lambda f, t: with_config(f, t, model_type="strange"), "strange"),
    "wrong shape": (lambda f, t: with_config(f, t, intermediate_size=96), "mlp"),
    "lying gguf": (lying_gguf, "gguf"),
    "missing": (lambda f, t: t / "nowhere", "nowhere"),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("forerun: ") and err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_broken_models_get_one_clear_line(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, word = BROKEN_MODELS[case]
    line = refused(["generate", "-m", str(make(folder, tmp_path / "broken")), "-p", "hi"], capsys)
    assert word.lower() in line.lower()


BAD_FLAGS: dict[str, tuple[list[str], str]] = {
    "unknown flag": (["-p", "hi", "--temprature", "1"], "--temprature"),
    "negative temperature": (["-p", "hi", "--temp", "-1"], "temperature"),
    "nan temperature": (["-p", "hi", "--temp", "nan"], "temperature"),
    "top-p": (["-p", "hi", "--top-p", "1.5"], "top"),
    "empty prompt": (["-p", ""], "empty"),
    "long prompt": (["-p", "word " * 3000], "context"),
    "no prompt": ([], "prompt"),
    "zero tokens": (["-p", "hi", "-n", "0"], "tokens"),
    "draft model missing": (["-p", "hi", "--draft", "model"], "--draft-model"),
    "device": (["-p", "hi", "--device", "cuda:99"], "cuda"),
    "dtype": (["-p", "hi", "--dtype", "bfloat16"], "float32"),
    "language": (["-p", "hi", "--lang-bias", "xx=1"], "xx"),
    "context": (["-p", "hi", "--max-context", "100000"], "context"),
    "everything suppressed": (["-p", "hi", "--suppress", ",".join(map(str, range(290)))], "ruled out"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_get_one_clear_line(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, word = BAD_FLAGS[case]
    assert word.lower() in refused(["generate", "-m", str(folder), *flags], capsys).lower()


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_config(folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused(["generate", "-m", str(folder), "-p", "hi", "--draft", "model", "--draft-model", str(other)], capsys)
    assert "tokenizer" in line


def test_chunks_add_up_and_tell_drafts_apart(model: LanguageModel) -> None:
    with forerun.stream(model, "hello there", max_tokens=30, draft="model") as answer:
        *chunks, last = list(answer)
    assert last.token is None and last.finish_reason == "length" and last.response is not None
    assert [c.token for c in chunks] == last.response.tokens
    assert "".join(c.text for c in [*chunks, last]) == last.response.text
    assert last.response.text == model.tokenizer.decode(last.response.tokens, skip_special_tokens=True)
    assert sum(c.from_draft for c in chunks) == last.response.accepted > 0


def test_a_left_answer_is_taken_up_again(model: LanguageModel) -> None:
    settings = {"max_tokens": 30, "temperature": 0.9, "seed": 5, "draft": "lookup"}
    whole = forerun.generate(model, "hello there", **settings)
    with forerun.stream(model, "hello there", **settings) as answer:
        first = [next(answer).token for _ in range(9)]
        answer.pause()
        forerun.generate(model, "somebody else", max_tokens=5)
        rest = [chunk.token for chunk in answer if chunk.token is not None]
        assert first + rest == whole.tokens
    with forerun.stream(model, "hello there", **{**settings, "max_tokens": 10}) as answer:
        short = [chunk.token for chunk in answer if chunk.token is not None]
        answer.extend(20)
        longer = [chunk.token for chunk in answer if chunk.token is not None]
        assert short + longer == whole.tokens
    assert model.engine.pool.free == model.engine.pool.count


@pytest.mark.parametrize("more", [0, -1, "3", 1.5, float("nan"), None, True])
def test_an_answer_goes_on_for_a_number_of_tokens_only(more: Any, model: LanguageModel) -> None:
    """extend(1.5) was taken, and the next round failed."""
    with forerun.stream(model, "hello there", max_tokens=4) as answer:
        assert len(list(answer)) == 5
        with pytest.raises(ForerunError, match="max_tokens must be a whole number"):
            answer.extend(more)
        answer.extend(2)
        assert len([chunk for chunk in answer if chunk.token is not None]) == 2


def test_a_path_is_as_good_as_its_name(folder: Path, model: LanguageModel) -> None:
    loaded = forerun.load(folder, draft_model=folder, max_context=np.int64(64))
    assert repr(loaded) == f"<LanguageModel {folder.name}: llama, int8 on cpu>"
    options: dict[str, Any] = {"max_tokens": 8, "draft": "model"}
    assert forerun.generate(loaded, "hello", **options).tokens == forerun.generate(model, "hello", **options).tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": 3}, "the model must be a name or a path, not 3"),
        ({"model": None}, "the model must be a name or a path, not None"),
        ({"draft_model": 3}, "draft_model must be a name or a path"),
        ({"head": 3}, "head must be a name or a path"),
        ({"head": ""}, "head must be a name or a path, not ''"),
        ({"max_context": "many"}, "max_context must be a whole number"),
        ({"max_context": 64.5}, "max_context must be a whole number"),
        ({"assistant_position": "q"}, "must be n-1 or n, not 'q'"),
    ],
)
def test_bad_arguments_of_load_get_one_clear_line(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ForerunError, match=words):
        forerun.load(**{"model": folder} | options)


def test_a_model_is_loaded_before_it_is_asked() -> None:
    for ask in (forerun.generate, forerun.stream):
        with pytest.raises(ForerunError, match=r"^load the model first: .* not 'smollm2'$"):
            ask("smollm2", "hello")  # type: ignore[arg-type]


def test_stop_strings_cut_the_text_but_not_the_count(model: LanguageModel) -> None:
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "suppress": [2]}
    whole = forerun.generate(model, "hello there", **settings)
    stop = whole.text[10:14]
    for draft in ("off", "lookup", "model"):
        cut = forerun.generate(model, "hello there", **settings, stop=[stop], draft=draft)
        assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
        assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    """Some tokenizers have more of them than the embedding has rows: Gemma 3 1B has one for pictures."""
    model = forerun.load(str(tiny_model(tmp_path, "llama", num_hidden_layers=1, vocab_size=280)))
    assert len(model.tokenizer) == 290 and forerun.generate(model, [5, 279], max_tokens=1).tokens
    with pytest.raises(ForerunError, match="the prompt has token 285, and the model's tokens end at 279"):
        forerun.generate(model, [5, 285], max_tokens=1)


def test_a_request_without_a_seed_gets_one(model: LanguageModel) -> None:
    first = forerun.generate(model, "hello", max_tokens=20, temperature=1.0)
    again = forerun.generate(model, "hello", max_tokens=20, temperature=1.0, seed=first.seed)
    other = forerun.generate(model, "hello", max_tokens=20, temperature=1.0)
    assert again.tokens == first.tokens
    assert other.seed != first.seed and other.tokens != first.tokens  # equal by chance: below 1e-20


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("forerun.loading.run_probe", "GiB free: free some"),
        ("forerun.loading.load_head", "is out of memory"),
        ("forerun.engine.runner.Runner.start", "is out of memory"),
    ],
)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, line: str, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    folder = tiny_model(tmp_path, "llama")
    monkeypatch.setattr(place, full)
    with pytest.raises(forerun.ForerunError, match=line):
        forerun.generate(forerun.load(str(folder)), "hi", max_tokens=4)
