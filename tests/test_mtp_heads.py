"""Finding and loading MTP heads: which fits which model, and what is said about those that do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from heads import HeadShape, random_head, write_head
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.fingerprint import SOURCE_HASH, fingerprint
from forerun.weights.heads import find_head, read_head

SHAPE = HeadShape(64, size=16, taps=(1,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "tiny", folder, SHAPE, random_head(SHAPE))


@pytest.fixture(autouse=True)
def nothing_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("forerun.weights.heads.PACKAGED", tmp_path / "packaged")
    return tmp_path / "packaged"


def copied(source: Path, place: Path, **changes: object) -> Path:
    """A copy of a folder with entries of its config.json replaced."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def test_the_command_line_drafts_with_a_head(folder: Path, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {}
    command = ["generate", "-m", str(folder), "-p", "hello there", "-n", "12", "--temp", "0.7", "--seed", "3", "--json"]
    for draft in ("off", "mtp", "auto"):
        extra = [] if draft == "off" else ["--head", str(head)]
        assert main([*command, "--draft", draft, *extra]) == 0
        out, err = capsys.readouterr()
        answers[draft] = json.loads(out)
        assert err == ""
    assert answers["off"]["tokens"] == answers["mtp"]["tokens"] == answers["auto"]["tokens"]
    assert answers["mtp"]["draft"] == answers["auto"]["draft"] == "mtp"
    assert answers["mtp"]["drafted"] > 0 and answers["mtp"]["guaranteed"]


def test_without_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(folder), "-p", "hi", "-n", "3", "--draft", "mtp"]) == 2
    err = capsys.readouterr().err
    assert "no MTP head" in err and "--head" in err and str(folder) in err and err.count("\n") == 1
    assert main(["generate", "-m", str(folder), "-p", "hi", "-n", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["draft"] == "lookup" and err == ""
    assert main(["generate", "-m", str(folder), "-p", "hi", "--head", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def without(name: str) -> Callable[[Path], None]:
    def damage(head: Path) -> None:
        tensors = load_file(head / "head.safetensors")
        del tensors[name]
        save_file(tensors, head / "head.safetensors")

    return damage


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(head: Path) -> None:
        save_file(load_file(head / "head.safetensors") | {name: tensor}, head / "head.safetensors")

    return damage


def in_8_bits(scale: torch.Tensor | None, inner: int = SHAPE.inner) -> Callable[[Path], None]:
    name = "mtp.layers.0.mlp.down_proj.weight"

    def damage(head: Path) -> None:
        with_tensor(name, torch.ones(SHAPE.hidden, inner, dtype=torch.int8))(head)
        if scale is not None:
            with_tensor(name + ".scale", scale)(head)

    return damage


def with_entry(name: str, value: object) -> Callable[[Path], None]:
    def damage(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        part, _, key = name.rpartition(".")
        (config[part] if part else config)[key] = value
        (head / "config.json").write_text(json.dumps(config))

    return damage


def cut_short(head: Path) -> None:
    (head / "head.safetensors").write_bytes((head / "head.safetensors").read_bytes()[:-500])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda head: (head / "config.json").unlink(), "config.json"),
    "no weights": (lambda head: (head / "head.safetensors").unlink(), "head.safetensors"),
    "cut short": (cut_short, "damaged"),
    "not json": (lambda head: (head / "config.json").write_text("{"), "JSON"),
    "another format": (with_entry("format", "gguf"), "gguf"),
    "a later version": (with_entry("version", 3), "version 1 or 2: a later one needs a newer forerun"),
    "no target": (with_entry("target", None), "target"),
    "no layer": (with_entry("layer", [1]), "layer"),
    "another hidden size": (with_entry("target.hidden_size", 128), "hidden size 128"),
    "another depth": (with_entry("target.num_hidden_layers", 30), "30 layers"),
    "another family": (with_entry("target.model_type", "qwen2"), "qwen2"),
    "a size in words": (with_entry("target.vocab_size", "many"), "vocab_size"),
    "a tap too deep": (with_entry("taps", [2]), "taps"),
    "a tap twice": (with_entry("taps", [1, 1]), "taps"),
    "no heads": (with_entry("layer.num_attention_heads", 0), "num_attention_heads"),
    "odd heads": (with_entry("layer.num_key_value_heads", 3), "layer"),
    "a strange rope": (with_entry("layer.rope_parameters", {"rope_type": "spiral", "rope_theta": 1.0}), "spiral"),
    "a rope in words": (with_entry("layer.rope_parameters", {"rope_theta": "x"}), "layer"),
    "a missing tensor": (without("mtp.fc.weight"), "mtp.fc.weight"),
    "a missing norm": (without("mtp.tap_norms.1.weight"), "mtp.tap_norms.1.weight"),
    "a wrong shape": (with_tensor("mtp.fuse.weight", torch.zeros(64, 64)), "mtp.fuse.weight"),
    "a tensor too many": (with_tensor("mtp.layers.1.input_layernorm.weight", torch.zeros(64)), "mtp.layers.1"),
    "8 bits without scales": (in_8_bits(None), "down_proj.weight is stored as I8 without"),
    "too few scales": (in_8_bits(torch.ones(63)), "down_proj.weight.scale"),
    "scales in half precision": (in_8_bits(torch.ones(64).half()), "down_proj.weight.scale"),
    "a scale that is no number": (in_8_bits(torch.full((64,), torch.nan)), "down_proj.weight.scale"),
    "a negative scale": (in_8_bits(-torch.ones(64)), "down_proj.weight.scale"),
    "8 bits of a wrong shape": (in_8_bits(torch.ones(64), 87), "down_proj.weight has shape (64, 87)"),
    "ids not ascending": (with_tensor("mtp.draft_vocab", torch.tensor([3, 2])), "draft_vocab"),
    "ids too large": (with_tensor("mtp.draft_vocab", torch.tensor([3, 300])), "draft_vocab"),
    "no ids": (with_tensor("mtp.draft_vocab", torch.zeros(0, dtype=torch.int64)), "draft_vocab"),
    "ids beyond the tokenizer": (with_tensor("mtp.draft_vocab", torch.tensor([295])), "draft_vocab"),
    "ids that are no integers": (with_tensor("mtp.draft_vocab", torch.tensor([3.0])), "draft_vocab"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_head(case: str, folder: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error for who asks for it by name, a warning and another drafter for who does not."""
    damage, word = BROKEN[case]
    broken = copied(head, tmp_path / "broken")
    damage(broken)
    model = forerun.load(str(folder), head=broken)
    with pytest.raises(ForerunError) as caught:
        forerun.generate(model, "hi", max_tokens=2, draft="mtp")
    assert word in str(caught.value) and "\n" not in str(caught.value)
    answer = forerun.generate(model, "hi", max_tokens=2)
    assert answer.draft == "lookup"
    (warning,) = answer.warnings
    assert word in warning
    assert forerun.generate(model, "hi", max_tokens=2, draft="lookup").warnings == []


def test_a_broken_head_on_the_command_line(
    folder: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copied(head, tmp_path / "broken", version=9)
    command = ["generate", "-m", str(folder), "-p", "hi", "-n", "3", "--quiet", "--head", str(broken)]
    assert main([*command, "--draft", "mtp"]) == 2
    assert "version 9" in capsys.readouterr().err
    assert main(command) == 0
    assert "forerun: warning: " in capsys.readouterr().err


def test_packaged_heads_are_matched_by_hash_and_shape(
    folder: Path, head: Path, nothing_packaged: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(folder)
    assert find_head(checkpoint, None) is None
    target = json.loads((head / "config.json").read_text())["target"]
    copied(head, nothing_packaged / "a-wide-one", target=target | {"hidden_size": 128})
    assert find_head(checkpoint, None) is None
    copied(head, nothing_packaged / "another", target=target | {"hash": "0" * 64})
    found = find_head(checkpoint, None)
    assert found is not None and found.folder.path.name == "another"
    assert found.warning is not None and "another" in found.warning
    copied(head, nothing_packaged / "the-one")
    found = find_head(checkpoint, None)
    assert found is not None and found.folder.path.name == "the-one" and found.warning is None
    answer = forerun.generate(forerun.load(str(folder)), "hi", max_tokens=2)
    assert (answer.draft, answer.warnings) == ("mtp", [])
    answer = forerun.generate(forerun.load(str(folder), head=None), "hi", max_tokens=2)
    assert (answer.draft, answer.warnings) == ("lookup", [])


def test_other_weights_of_the_same_shape_are_warned_about(head: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "llama", tie_word_embeddings=True, seed=1)
    model = forerun.load(str(other), head=head)
    answer = forerun.generate(model, "hi", max_tokens=4, draft="mtp")
    (warning,) = answer.warnings
    assert answer.draft == "mtp" and "other weights" in warning
    assert answer.tokens == forerun.generate(model, "hi", max_tokens=4, draft="off").tokens


def test_another_shape_names_both(folder: Path, head: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "llama", num_hidden_layers=3)
    with pytest.raises(ForerunError, match=r"2 layers.*3 layers"):
        find_head(open_checkpoint(other), head)


def test_the_fingerprint_tells_weights_apart(folder: Path, tmp_path: Path) -> None:
    own = fingerprint(open_checkpoint(folder))
    assert len(own) == 64 and own == fingerprint(open_checkpoint(folder))
    tensors = load_file(folder / "model.safetensors")

    def of(changed: dict[str, torch.Tensor]) -> str:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        copied(folder, copy)
        save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
        return fingerprint(open_checkpoint(copy))

    assert of(tensors) == own
    name = "model.layers.1.mlp.down_proj.weight"
    first, last = tensors[name].clone(), tensors[name].clone()
    first[0, 0] += 1
    last[-1, -1] += 1
    different = [
        of(tensors | {name: first}),
        of(tensors | {name: last}),
        of(tensors | {name: tensors[name].bfloat16()}),
        of(tensors | {name: tensors[name].T.contiguous()}),
        of({("model.extra" if key == name else key): value for key, value in tensors.items()}),
    ]
    assert len({own, *different}) == 6


def test_a_converted_folder_keeps_the_hash_of_its_source(folder: Path, tmp_path: Path) -> None:
    converted = copied(folder, tmp_path / "converted", **{SOURCE_HASH: "AB" * 32})
    assert fingerprint(open_checkpoint(converted)) == "ab" * 32
    nonsense = copied(folder, tmp_path / "nonsense", **{SOURCE_HASH: "x" * 64})
    assert fingerprint(open_checkpoint(nonsense)) == fingerprint(open_checkpoint(folder))


def test_a_head_of_an_untied_target_with_its_own_vocabulary(tmp_path: Path) -> None:
    target = tiny_model(tmp_path / "target", "qwen3", hidden_size=64)
    shape = HeadShape(64, size=16, head_norms=True)
    head = write_head(tmp_path / "head", target, shape, random_head(shape), list(range(0, 300, 7)))
    model = forerun.load(str(target), head=head)
    assert read_head(head).taps == ()
    for temperature in (0.0, 1.0):
        options = {"max_tokens": 20, "temperature": temperature, "seed": 2}
        plain, drafted = (forerun.generate(model, "hello", draft=draft, **options) for draft in ("off", "mtp"))
        assert drafted.tokens == plain.tokens and drafted.drafted > 0 and not drafted.warnings
