"""Checkpoints: every tensor is named when missing, misshapen or left over; hostile folders are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from forerun.errors import ForerunError
from forerun.weights.checkpoint import Checkpoint, open_checkpoint
from forerun.weights.config import check_config
from forerun.weights.folder import INDEX


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("original"), "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A fresh copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Splits model.safetensors in two and writes the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ForerunError, match=match) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_taken_as_stored(folder: Path, sharded: bool) -> None:
    wanted = shard(folder) if sharded else load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == wanted.keys()
    for name, tensor in wanted.items():
        assert checkpoint.has(name) and checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    assert checkpoint.leftovers(lambda name: False) == []
    checkpoint.finish(lambda name: False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_number_format_is_kept(folder: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(3, dtype=dtype)}, folder / "model.safetensors")
    assert open_checkpoint(folder).take("a", (3,)).dtype == dtype


def test_missing_misshapen_and_leftover_tensors_are_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ForerunError, match=r"model\.layers\.9\.nothing"):
        checkpoint.take("model.layers.9.nothing", (1,))
    with pytest.raises(ForerunError, match=r"model\.norm\.weight has shape \(64,\), expected \(65,\)"):
        checkpoint.take("model.norm.weight", (65,))
    checkpoint.take("model.norm.weight", (64,))
    left = checkpoint.leftovers(lambda name: "layers" in name)
    assert left == ["lm_head.weight", "model.embed_tokens.weight"]
    with pytest.raises(ForerunError, match=r"lm_head\.weight, model\.embed_tokens\.weight, .* and 15 more"):
        checkpoint.finish(lambda name: False)


def test_quantised_values_without_a_word_in_the_config_are_refused(folder: Path) -> None:
    save_file({"a": torch.ones(3).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ForerunError, match="F8_E4M3"):
        open_checkpoint(folder).take("a", (3,))


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, "truncated or damaged")


def test_a_pointer_in_the_place_of_weights_says_how_to_get_them(folder: Path) -> None:
    """What `git clone` leaves where git-lfs is not installed."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ForerunError, match=r"model\.safetensors is only a pointer .* run git lfs pull"):
        open_checkpoint(folder)


def test_a_name_that_is_no_utf_8_is_not_called_damage(original: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original, tmp_path / os.fsdecode(b"m\xfcller")))
    refused(folder, "is not UTF-8: rename it")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_weights_that_cannot_be_read_say_why() -> None:
    """safetensors says of a file without permission that it does not exist; looking into it then was a traceback."""
    with pytest.raises(ForerunError, match=r"cannot read /proc/self/mem: Input/output error"):
        Checkpoint(Path("folder"), {}, [Path("/proc/self/mem")])


def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "model-00002-of-00002")
    file.unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing")


def test_an_absurd_safetensors_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    refused(folder, "truncated or damaged")
    header = json.dumps({"a": {"dtype": "x" * 5000, "shape": [], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, "truncated or damaged")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "AWQ"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "AWQ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "forerun-blocks", "format": "q9_0"}}, r"forerun-blocks \(q9_0\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, r"ModelOpt \(NVFP4\)"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "next-years"}}, "next-years"),
        ({"quantization_config": {"bits": 4}}, "unnamed"),
        ({"quantization_config": "yes"}, "unnamed"),
        ({"quantization": {"group_size": 64, "bits": True}}, r"MLX"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "nvfp4"}}, r"MLX \(nvfp4\)"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "MXFP4"),
    ],
)
def test_quantised_models_are_refused_by_name(folder: Path, settings: dict[str, object], name: str) -> None:
    change_config(folder, **settings)
    refused(folder, f"{name}.* use the original")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("key", ["auto_map", "model_file"])
def test_code_from_the_folder_is_refused_and_not_run(folder: Path, tmp_path: Path, key: str, nested: bool) -> None:
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    value: object = "evil.py" if key == "model_file" else {"AutoModelForCausalLM": "evil.Model"}
    change_config(folder, **({"text_config": {key: value}} if nested else {key: value}))
    refused(folder, key)
    assert not canary.exists()


def test_an_empty_auto_map_is_harmless() -> None:
    check_config({"model_type": "llama", "auto_map": {}, "quantization_config": None}, "here")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth"])
def test_pickle_only(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, f"pickle.*{name}")


def spoil_index(value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(json.dumps(value))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "a.gguf"), "give the file itself"),
        (spoil_index({}), "weight_map"),
        (spoil_index({"weight_map": {"a": 7}}), "only .safetensors"),
        (spoil_index({"weight_map": {"a": "weights.bin"}}), "only .safetensors"),
        (spoil_index({"weight_map": {"a": "x" * 5000}}), "only .safetensors"),
        (spoil_index({"weight_map": {"a": "x" * 5000 + ".safetensors"}}), "is missing"),
        (spoil_index({"weight_map": {"a": "../up.safetensors"}}), "outside"),
        (spoil_index({"weight_map": {"a": "/etc/up.safetensors"}}), "outside"),
        (spoil_index({"weight_map": {"a": "..\\up.safetensors"}}), "outside"),
        (lambda folder: (shard(folder), (folder / INDEX).unlink()), "no model.safetensors.index.json"),
    ],
)
def test_broken_folders_get_one_clear_line(folder: Path, spoil: Callable[[Path], object], match: str) -> None:
    spoil(folder)
    refused(folder, match)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refused(folder, "leaves the model folder")


def test_the_hub_cache_keeps_its_links(original: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in original.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    assert open_checkpoint(snapshot).names()


def test_the_same_tensor_in_two_files_is_refused(folder: Path) -> None:
    shard(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    shutil.copy(first, second)
    refused(folder, "also in another file")
