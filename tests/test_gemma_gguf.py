"""GGUF files of Gemma 3 and Gemma 4, written the way llama.cpp does: the same model as the folder they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_gemma3 import write as write_gemma3
from test_models import load, run
from tiny import gguf_values, opened
from tiny_gemma import VARIANTS, random_assistant, random_gemma, save_assistant, save_gemma, tiny_gemma

import forerun
from forerun.cache.pages import PagePool, SequenceCache
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.text.chat import encode_prompt
from forerun.weights.generation_config import suppressed_tokens
from forerun.weights.gguf_header import read_header
from forerun.weights.tokenizer import load_tokenizer

TOKENS = torch.randint(4, 280, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "t", "h", "e", "th", "the", "▁the", "c", "a", "ca", "cat", "▁cat"]
MERGES = ["t h", "th e", "▁ the", "c a", "ca t", "▁ cat"]


def write_gguf(file: Path, folder: Path, **changes: Any) -> Path:
    """The model of a folder as a file."""
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"].split("_")[0]
    writer = gguf.GGUFWriter(file, name)
    kinds, layers = config["layer_types"], config["num_hidden_layers"]
    describe(writer, config)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gemma3":
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        for add in (writer.add_key_length, writer.add_value_length):
            add(config["head_dim"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])
    else:
        describe_gemma4(writer, config, kinds)
    add_tokenizer(writer, name)
    for key, value in changes.items():
        writer.kv_data[0].pop(key, None)
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(key, value)
    tensors = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], layers)
    for key, array in tensors.items():
        add_tensor(writer, names, name, key, array)
    finish(writer)
    return file


def describe(writer: Any, config: dict[str, Any]) -> None:
    """What all of them have."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe_gemma4(writer: Any, config: dict[str, Any], kinds: list[str]) -> None:
    changes = next(iter(config["per_layer_config"].values()))
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    for add, size in (("", changes["head_dim"]), ("_swa", config["head_dim"])):
        getattr(writer, f"add_key_length{add}")(size)
        getattr(writer, f"add_value_length{add}")(size)
        getattr(writer, f"add_rope_dimension_count{add}")(size)
    wide = 2 if config["use_double_wide_mlp"] else 1
    writer.add_feed_forward_length([inner] * (len(kinds) - shared) + [wide * inner] * shared)
    few = changes.get("num_key_value_heads", config["num_key_value_heads"])
    writer.add_head_count_kv([few if kind == "full_attention" else config["num_key_value_heads"] for kind in kinds])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    turning = int(changes["head_dim"] * 0.25 / 2)
    factors = [1.0] * turning + [1e30] * (changes["head_dim"] // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def add_tokenizer(writer: Any, name: str) -> None:
    writer.add_tokenizer_model("llama" if name == "gemma3" else "gemma4")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(index) for index in range(len(PIECES))])
    writer.add_token_types([3 if n < 5 else 6 if n < 261 else 1 for n in range(len(PIECES))])
    if name == "gemma4":
        writer.add_token_merges(MERGES)
    for number, kind in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def add_tensor(writer: Any, names: Any, family: str, key: str, array: Any) -> None:
    """Under the names that llama.cpp's converter gives."""
    if key.endswith("router.scale"):
        writer.add_tensor(names.get_name(key.replace("router.scale", "router.proj")) + ".scale", array)
    elif key.endswith("per_expert_scale"):
        writer.add_tensor(names.get_name(key.replace("router.per_expert_scale", "experts.down_proj")) + ".scale", array)
    elif key.endswith(("experts.gate_proj", "experts.up_proj")):
        part = key.rpartition(".")[2].removesuffix("_proj")
        writer.add_tensor(f"blk.{key.split('.')[2]}.ffn_{part}_exps.weight", array)
    else:
        if family == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        whole = key if key.endswith(".weight") else key + ".weight"
        writer.add_tensor(names.get_name(whole, (".weight",)), array)


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = load(folder, CpuKernels(quantize=False))
    cache = SequenceCache(PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu")))
    return torch.cat([run(model, cache, TOKENS[:20], True), run(model, cache, TOKENS[20:], False)])


@pytest.mark.parametrize("variant", [*VARIANTS, "gemma3"])
def test_a_file_is_the_model_it_came_from(variant: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if variant == "gemma3":
        write_gemma3(folder, "new")
        config = json.loads((folder / "config.json").read_text()) | {"query_pre_attn_scalar": 20}
        (folder / "config.json").write_text(json.dumps(config))  # what files of small models mean
    else:
        tiny_gemma(folder, variant)
        if variant == "12B":  # files do not tell it apart
            config = json.loads((folder / "config.json").read_text()) | {"model_type": "gemma4_text"}
            (folder / "config.json").write_text(json.dumps(config | {"hidden_size_per_layer_input": 0}))
    converted = write_gguf(tmp_path / "model.gguf", folder)
    torch.testing.assert_close(logits(converted), logits(folder), atol=0 if variant != "gemma3" else 1e-4, rtol=0)
    tokenizer = load_tokenizer(converted)
    assert encode_prompt(tokenizer, "the cat", raw=True) == [PIECES.index(piece) for piece in ("<bos>", "the", "▁cat")]


@pytest.mark.parametrize("clusters", [0, 30])
def test_an_assistant_drafts_as_the_folder_it_came_from(clusters: int, tmp_path: Path) -> None:
    """Names and metadata as llama.cpp's converter writes them; it drops clusters, and other files' are not read."""
    target = random_gemma("31B")
    save_gemma(tmp_path / "target", target)
    folder = save_assistant(tmp_path / "assistant", random_assistant(target, clusters=clusters))
    file = write_assistant(tmp_path / "assistant.gguf", folder)
    settings = json.loads((folder / "config.json").read_text()) | {"use_ordered_embeddings": False}
    (folder / "config.json").write_text(json.dumps(settings))  # the file has one dense head
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if "masked" not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = forerun.load(str(tmp_path / "target"), draft_model=str(file))
    assert model.engine.drafters.by_name["assistant"] is not None
    asked = {"max_tokens": 24, "draft": "assistant", "draft_tokens": 3, "temperature": 3.0, "seed": 1}
    found = forerun.generate(model, TOKENS, **asked)
    theirs = forerun.generate(forerun.load(str(tmp_path / "target"), draft_model=str(folder)), TOKENS, **asked)
    assert (found.tokens, found.drafted, found.accepted) == (theirs.tokens, theirs.drafted, theirs.accepted)
    assert found.drafted > 0
    for name, tensor in gguf_values(file).items():
        assert np.array_equal(tensor.numpy(), tensors[name]), name


def test_an_assistant_is_found_beside_the_file_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    target = random_gemma("31B")
    folder = save_assistant(tmp_path / "assistant", random_assistant(target))
    file = write_gguf(tmp_path / "gemma-4-tiny-it-F16.gguf", save_gemma(tmp_path / "target", target))
    write_assistant(tmp_path / "gemma-4-assistant.gguf", folder).write_bytes(b"GGUF")  # a longer name fits better
    write_assistant(tmp_path / "gemma-5-tiny-it-assistant.gguf", folder)
    beside = write_assistant(tmp_path / "gemma-4-tiny-it-assistant-F16.gguf", folder)
    model = forerun.load(str(file))
    assert set(model.engine.drafters.by_name) == {"lookup", "assistant"} and not model.head_warnings
    asked = {"max_tokens": 24, "temperature": 3.0, "seed": 1}
    drafted = forerun.generate(model, TOKENS, **asked, draft="assistant", draft_tokens=3)
    assert drafted.tokens == forerun.generate(model, TOKENS, **asked, draft="off").tokens and drafted.drafted
    beside.write_bytes(beside.read_bytes()[:400])  # half downloaded: the model works without it, and says so
    alone = forerun.load(str(file))
    assert set(alone.engine.drafters.by_name) == {"lookup"}
    assert [line for line in alone.head_warnings if beside.name in line]
    beside.unlink()
    (tmp_path / "gemma-4-assistant.gguf").unlink()
    assert not forerun.load(str(file)).head_warnings


def write_assistant(file: Path, folder: Path) -> Path:
    """The assistant of a folder as a file."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    writer = gguf.GGUFWriter(file, "gemma4-assistant")
    describe(writer, text)
    describe_gemma4(writer, text, text["layer_types"])
    writer.add_uint32("gemma4-assistant.embedding_length_out", config["backbone_hidden_size"])
    writer.add_uint32("gemma4-assistant.nextn_predict_layers", text["num_hidden_layers"])
    add_tokenizer(writer, "gemma4")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text["num_hidden_layers"])
    own = {
        "pre_projection.weight": "nextn.pre_projection.weight",
        "post_projection.weight": "nextn.post_projection.weight",
        "masked_embedding.centroids.weight": "masked_embd_centroids.weight",
        "masked_embedding.token_ordering": "masked_embd_ordering",
    }
    for key, array in load_file(folder / "model.safetensors").items():
        if key in own:
            writer.add_tensor(own[key], array.astype(np.int32) if array.dtype == np.int64 else array)
        else:
            add_tensor(writer, names, "gemma4", key, array)
    finish(writer)
    return file


def test_gates_of_experts_may_be_stored_apart(tmp_path: Path) -> None:
    folder = tiny_gemma(tmp_path / "folder", "26B-A4B")
    expected, whole = logits(folder), convert(str(folder), tmp_path / "whole", quantize="int8").folder
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        tensors |= {name.replace("gate_up", "gate"): gate.copy(), name.replace("gate_up", "up"): up.copy()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(folder), expected)
    file = write_gguf(tmp_path / "model.gguf", folder)
    assert any(tensor.name == "blk.0.ffn_up_exps.weight" for tensor in read_header(file).tensors)
    assert torch.equal(logits(file), expected)
    small = convert(str(folder), tmp_path / "small", quantize="int8").folder
    assert load_file(small / "model.safetensors")["model.layers.0.experts.up_proj"].dtype == np.int8
    assert torch.equal(logits(small), logits(whole))


def test_tokens_that_never_come_are_taken_over(tmp_path: Path) -> None:
    never = {"tokenizer.ggml.suppress_tokens": [7, 9]}
    file = write_gguf(tmp_path / "model.gguf", tiny_gemma(tmp_path / "folder", "31B"), **never)
    assert suppressed_tokens(file) == {7, 9}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention.shared_kv_layers", 9, "attention.shared_kv_layers"),
        ("attention.head_count_kv", 0, "attention.head_count_kv"),
        ("embedding_length_per_layer_input", 8, "tensor per_layer_token_embd.weight is missing"),
    ],
)
def test_senseless_metadata_is_named(key: str, value: int, named: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_gemma(tmp_path / "folder", "31B"), **{f"gemma4.{key}": value})
    with pytest.raises(ForerunError, match=named):
        opened(file)
