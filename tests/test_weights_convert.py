"""`forerun convert`: same bits, same tokens, heads kept, odd checkpoints named, nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_bodies import RoundsRows
from engines import decoder, engine, request, run
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_gemma import random_assistant, random_gemma, save_assistant, save_gemma
from tiny_qwen import random_model, save_model

import forerun
import forerun.conversion as module
from forerun.cache.pages import PagePool, SequenceCache
from forerun.cli.main import main
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.matrix import FloatMatrix, TiledMatrix
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.fingerprint import fingerprint

PROMPT = [5, 6, 7, 8, 5, 6, 7]
FAMILIES = ["llama", "dense", "sparse"]


def make(folder: Path, family: str) -> Path:
    if family == "llama":
        return tiny_model(folder, "llama")
    return save_model(folder, random_model(family == "sparse"), nested=True, fused=False)


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def tokens(model: Decoder) -> list[int]:
    return run(engine(model), request(PROMPT, max_tokens=20))[0].tokens


def test_a_round_trip_keeps_every_bit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.weights.folder.FILE_BYTES", 40_000)
    done = convert(str(source), tmp_path / "new")
    assert (done.folder / "model.safetensors.index.json").is_file()
    expected = tensors(source)
    assert same(tensors(done.folder), expected)
    assert fingerprint(open_checkpoint(done.folder)) == fingerprint(open_checkpoint(source))
    assert tokens(decoder(done.folder, quantize=True)) == tokens(decoder(source, quantize=True))
    assert {p.name for p in source.glob("tokenizer*")} <= {p.name for p in done.folder.iterdir()}
    # A second conversion says the same.
    assert same(tensors(convert(str(done.folder), tmp_path / "again").folder), expected)


def test_8_bits_are_those_of_rounded_rows(source: Path, tmp_path: Path) -> None:
    from test_models import load

    done = convert(str(source), tmp_path / "small", quantize="int8")
    ours, theirs = load(done.folder, CpuKernels(True)), load(source, RoundsRows(True))
    ours_all, theirs_all = [*ours.block_matrices(), ours.head], [*theirs.block_matrices(), theirs.head]
    for left, right in zip(ours_all, theirs_all, strict=True):
        assert isinstance(left, TiledMatrix) and isinstance(right, TiledMatrix)
        assert left.kind == right.kind and left.exact == right.exact
        assert all(np.array_equal(a.data, b.data) for a, b in zip(left.parts, right.parts, strict=True))
    stored = tensors(done.folder)
    small = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert {name.removesuffix(".scale") for name in stored if name.endswith(".scale")} == set(small)
    assert not any(part in name for name in small for part in ("fc", "in_proj_a", "in_proj_b", "gate.weight", "conv1d"))
    assert sum(m.bytes for m in ours.block_matrices() if isinstance(m, TiledMatrix) and not m.exact) >= sum(
        stored[n].nbytes for n in small if ".layers." in n and not n.startswith("mtp.")
    )
    assert tokens(ours) == tokens(theirs)
    decoder(done.folder, quantize=False)  # and in full precision, from the rounded values
    with pytest.raises(ForerunError, match="already"):
        convert(str(done.folder), tmp_path / "smaller", quantize="int8")
    assert same(tensors(convert(str(done.folder), tmp_path / "copy").folder), stored)


@torch.inference_mode()
def test_8_bits_serve_other_precisions(source: Path, tmp_path: Path) -> None:
    """No product in 8 bits, and activations that are not float32, as bfloat16 on a GPU."""
    done = convert(str(source), tmp_path / "small", quantize="int8")
    slow = ReferenceKernels()
    slow.joins_gates = True
    cpu, other = torch.device("cpu"), torch.float64
    model = build(open_checkpoint(done.folder), slow, cpu, other, NullProgress())
    assert {m.weight.dtype for m in [*model.block_matrices(), model.head] if isinstance(m, FloatMatrix)} == {other}
    cache = SequenceCache(PagePool.for_model(model.config, 4, 16, other, cpu))
    cache.grow(len(PROMPT))
    found = model.forward(make_pass([(cache, PROMPT)], last_only=False, prompt=True)).logits
    full = decoder(done.folder, quantize=False)
    cache = SequenceCache(PagePool.for_model(full.config, 4, 16, torch.float32, cpu))
    cache.grow(len(PROMPT))
    expected = full.forward(make_pass([(cache, PROMPT)], last_only=False, prompt=True)).logits
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=0)


def test_a_converted_head_drafts(tmp_path: Path) -> None:
    source = save_model(tmp_path / "m", random_model(False))
    done = convert(str(source), tmp_path / "small", quantize="int8")
    assert any("MTP head is complete (15 tensors)" in note for note in done.notes)
    for folder in (source, done.folder):
        model = forerun.load(str(folder))
        plain = forerun.generate(model, PROMPT, max_tokens=12, draft="off")
        answer = forerun.generate(model, PROMPT, max_tokens=12, draft="mtp", draft_tokens=3)
        assert answer.drafted > 0 and answer.draft == "mtp" and answer.tokens == plain.tokens


def test_a_stripped_checkpoint_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_model(tmp_path / "m", random_model(False), head=False)
    assert main(["convert", str(source), str(tmp_path / "new"), "--quiet"]) == 0
    said = capsys.readouterr()
    assert "no mtp.* tensors" in said.err and "stripped" in said.err and "MB" in said.out


def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    source = make(tmp_path / "m", "llama")
    kept = tmp_path / "kept"
    kept.mkdir()
    convert(str(source), kept)  # empty: fine
    before = sorted(kept.iterdir())
    with pytest.raises(ForerunError, match="not an empty folder"):
        convert(str(source), kept)
    assert sorted(kept.iterdir()) == before


def test_links_to_files_elsewhere_are_not_followed(tmp_path: Path) -> None:
    """A converted folder may be published; what lies beside the source is nobody's business."""
    folder = tiny_model(tmp_path / "model", "llama")
    (tmp_path / "secret").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ForerunError, match=r"notes\.txt is a link that leaves the model folder"):
        convert(str(folder), tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_an_assistant_that_is_left_behind_is_named(tmp_path: Path) -> None:
    model = random_gemma("31B")
    folder = save_gemma(tmp_path / "model", model)
    assistant = save_assistant(folder / "assistant", random_assistant(model))
    (note,) = convert(str(folder), tmp_path / "converted").notes
    assert str(assistant) in note and "--draft-model" in note


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "m", "llama")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_side_files", fails)
    with pytest.raises(ForerunError, match="No space left"):
        convert(str(source), tmp_path / "out" / "new")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """safetensors has errors of its own for it, which came through."""
    resource = pytest.importorskip("resource")
    source = make(tmp_path / "m", "llama")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # bytes of a file: less than the weights have
    try:
        with pytest.raises(ForerunError, match=r"cannot write .*: File too large"):
            convert(str(source), tmp_path / "out" / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_tokenizer_has_a_class_that_older_transformers_know(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "llama")
    written = json.loads((source / "tokenizer_config.json").read_text())
    new = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_end|>"]}
    (source / "tokenizer_config.json").write_text(json.dumps(written | new))
    convert(str(source), tmp_path / "converted")
    settings = json.loads((tmp_path / "converted/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_end|>"] and "extra_special_tokens" not in settings
