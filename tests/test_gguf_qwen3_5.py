"""GGUF files of Qwen3.5, written the way llama.cpp does: the same model as the folder they came from, head included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import load, run
from tiny import gguf_values, opened, tiny_tokenizer
from tiny_qwen_gguf import tiny_folder, write_gguf

import forerun
from forerun.cache.pages import PagePool, SequenceCache
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.text.chat import encode_chat
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.generation_config import suppressed_tokens
from forerun.weights.gguf_header import read_header
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids

TOKENS = torch.randint(4, 280, (40,), generator=torch.Generator().manual_seed(1)).tolist()
KNOWN = len(tiny_tokenizer())
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, tied": {"tied": True, "heads": "triple"},
    "dense, no head": {"head": False, "heads": "equal"},
    "sparse": {"sparse": True, "heads": "triple"},
    "sparse, tied, no head": {"sparse": True, "tied": True, "head": False},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversions of this test go."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in one tensor, gates and ups apart, as a file has them."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdecimal() else 0 for part in name.split(".")]):
        before, _, after = name.partition(".experts.")
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensors[name].chunk(2, dim=1)
            found |= {f"{before}.experts.gate_proj": gate, f"{before}.experts.up_proj": up}
        elif after.endswith(".weight"):
            stacks.setdefault(f"{before}.experts.{after.split('.')[1]}", []).append(tensors[name])
        else:
            found[name] = tensors[name]
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}


def computed(name: str) -> bool:
    """Stored as something else, so that a rounding lies between."""
    return ("norm" in name or name.endswith("A_log")) and not name.endswith("linear_attn.norm.weight")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_weight_comes_back(form: str, kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "folder", **FORMS[form])
    if kind == "BF16":
        half = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(half, folder / "model.safetensors", {"format": "pt"})
    done = write_gguf(tmp_path / "a.gguf", folder, kind=kind)
    before, after = together(load_file(folder / "model.safetensors")), gguf_values(done)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = tensor.to(after[name].dtype)
        assert wanted.shape == after[name].shape
        if computed(name):
            torch.testing.assert_close(after[name], wanted, atol=3e-7, rtol=3e-7)
        else:
            assert torch.equal(after[name], wanted), name
    assert sum(tensor.dtype == torch.bfloat16 for tensor in after.values()) > (20 if kind == "BF16" else -1)
    wanted_config = json.loads((folder / "config.json").read_text())
    found = open_checkpoint(done).config
    unsaid = {"bos_token_id", "architectures", "mtp_use_dedicated_embeddings", "rope_parameters"}
    for key in found.keys() - unsaid:
        assert found[key] == wanted_config[key], key
    for key in ("rope_theta", "partial_rotary_factor", "rope_type"):
        assert found["rope_parameters"][key] == wanted_config["rope_parameters"][key]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_rounded_weights_come_back_in_order(kind: str, tmp_path: Path) -> None:
    """Columns that were moved are rounded in other company; everything else as the rows alone would be."""
    folder = tiny_folder(tmp_path / "folder", sparse=True)
    done = write_gguf(tmp_path / "a.gguf", folder, kind=kind)
    before, after = together(load_file(folder / "model.safetensors")), gguf_values(done)
    code, rounded = gguf.GGMLQuantizationType[kind], 0
    for name, tensor in after.items():
        if tensor.dtype != torch.float16:
            continue
        rounded += 1
        wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(before[name].numpy(), code), code))
        if name.endswith("out_proj.weight"):
            torch.testing.assert_close(tensor.float(), before[name], atol=0.01 if kind == "Q8_0" else 0.15, rtol=0)
        else:
            assert torch.equal(tensor, wanted.half()), name
    assert rounded > 30
    assert logits(done).isfinite().all()


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    """Of the tokens that the tokenizer has."""
    model = load(folder, CpuKernels(quantize=False))
    cache = SequenceCache(PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu")))
    return torch.cat([run(model, cache, TOKENS[:20], True), run(model, cache, TOKENS[20:], False)])[:, :KNOWN]


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_file_is_the_model_it_came_from(form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path / "folder", **FORMS[form])
    file = write_gguf(tmp_path / "a.gguf", folder)
    found = logits(file)
    torch.testing.assert_close(found, logits(folder), atol=1e-5, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([TOKENS])).logits[
        0, :, :KNOWN
    ]
    torch.testing.assert_close(found, theirs, atol=3e-4, rtol=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_its_head_drafts(sparse: bool, tmp_path: Path, home: Path) -> None:
    folder = tiny_folder(tmp_path / "folder", sparse=sparse, heads="triple")
    file = write_gguf(tmp_path / "a.gguf", folder)
    model, original = (forerun.load(str(each), quantize="none") for each in (file, folder))
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 3.0, "seed": 1}
    found = forerun.generate(model, TOKENS, draft="mtp", draft_tokens=3, **asked)
    assert found.drafted > 0 and not found.warnings
    assert found.tokens == forerun.generate(model, TOKENS, draft="off", **asked).tokens
    theirs = forerun.generate(original, TOKENS, draft="mtp", draft_tokens=3, **asked)
    assert (found.tokens, found.drafted, found.accepted) == (theirs.tokens, theirs.drafted, theirs.accepted)
    assert forerun.generate(model, TOKENS, draft="auto", **asked).tokens == found.tokens


def test_axes_of_length_one_and_merged_experts(tmp_path: Path) -> None:
    """llama.cpp's tools may drop the first, and its converter may merge the second."""
    folder = tiny_folder(tmp_path / "folder", sparse=True)
    file = write_gguf(tmp_path / "a.gguf", folder, merged=True)
    names = {tensor.name: tensor.shape for tensor in read_header(file).tensors}
    assert "blk.4.ffn_gate_up_exps.weight" in names and "blk.0.ffn_up_exps.weight" not in names
    expected = logits(folder)
    torch.testing.assert_close(logits(file), expected, atol=1e-5, rtol=0)
    tensors = load_file(folder / "model.safetensors")
    flat = {name: tensor[0] if "shared_expert_gate" in name else tensor for name, tensor in tensors.items()}
    save_file(flat, folder / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "b.gguf", folder)
    assert {t.name: t.shape for t in read_header(file).tensors}["blk.0.ffn_gate_inp_shexp.weight"] == (64,)
    torch.testing.assert_close(logits(file), expected, atol=1e-5, rtol=0)


def test_a_listed_pattern_of_layers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "folder")
    listed = {"attention__recurrent_layers": [True, True, True, False, False], "full_attention_interval": None}
    done = write_gguf(tmp_path / "a.gguf", folder, **listed)
    assert open_checkpoint(done).config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_long_contexts_are_taken_over(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    extra = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    done = write_gguf(tmp_path / "a.gguf", tiny_folder(tmp_path / "folder"), **extra)
    rope = open_checkpoint(done).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)
    assert rope["mrope_section"] == [11, 11, 10] and rope["partial_rotary_factor"] == 0.5
    assert logits(done).isfinite().all()


def test_its_tokenizer(tmp_path: Path) -> None:
    """Cut as Qwen3.5's own tokenizer does: marks stay with letters, digits stand alone, characters are composed."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    folder = write_gguf(tmp_path / "a.gguf", tiny_folder(tmp_path / "folder"))
    tokenizer, plain = load_tokenizer(folder), tiny_tokenizer()
    model = json.loads(plain.backend_tokenizer.to_str())["model"]
    own = Qwen3_5Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    for text in ("the thing and  12 34\n\n it's", "हिन्दी ಕನ್ನಡ", "e\u0301te\u0301 漢字 😀"):
        assert tokenizer.encode(text) == own.encode(text)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")
    chat = [{"role": "user", "content": "hello"}]
    assert encode_chat(tokenizer, chat).ids == encode_chat(plain, chat).ids
    assert tokenizer.encode("<|im_start|>") == [1]
    assert stop_token_ids(folder, tokenizer) == {0, 2}
    assert suppressed_tokens(folder) == set(range(KNOWN, 300))


def test_a_head_that_was_left_out(tmp_path: Path, home: Path) -> None:
    """The converter counts a head that the config names though the weights have none."""
    folder = tiny_folder(tmp_path / "folder")
    file = write_gguf(tmp_path / "a.gguf", folder, leave_out=r"^blk\.4\.")
    model = forerun.load(str(file), quantize="none")
    assert any("no mtp.* tensors" in warning for warning in model.head_warnings)
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    expected = forerun.generate(forerun.load(str(folder), quantize="none"), TOKENS, draft="off", **asked).tokens
    assert forerun.generate(model, TOKENS, draft="auto", **asked).tokens == expected
    with pytest.raises(ForerunError, match="they were stripped"):
        forerun.generate(model, TOKENS, draft="mtp", **asked)


@pytest.mark.parametrize("name", ["nextn.embed_tokens", "nextn.shared_head_head"])
def test_a_head_with_a_vocabulary_of_its_own(name: str, tmp_path: Path, home: Path) -> None:
    folder = tiny_folder(tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"]}, folder / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "a.gguf", folder, rename={"output.weight": f"blk.4.{name}.weight"})
    model = forerun.load(str(file))
    assert any("embedding of its own is not supported" in warning for warning in model.head_warnings)


def test_conversion_keeps_the_head(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "folder", sparse=True)
    file = write_gguf(tmp_path / "a.gguf", folder)
    assert main(["convert", str(file), str(tmp_path / "new"), "--quantize", "int8", "--quiet"]) == 0
    assert "its MTP head is complete (20 tensors) and kept" in capsys.readouterr().err
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert stored["mtp.layers.0.mlp.experts.gate_proj"].dtype == torch.int8
    assert stored["mtp.fc.weight"].dtype == torch.float32
    model = forerun.load(str(tmp_path / "new"))
    found = forerun.generate(model, TOKENS, draft="mtp", draft_tokens=2, max_tokens=12)
    theirs = forerun.generate(model, TOKENS, draft="off", max_tokens=12)
    assert found.drafted > 0 and found.tokens == theirs.tokens


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a layer without its recurrence": ({"leave_out": r"blk\.1\.ssm_a$"}, "layer 1 linear_attention, .* neither kind"),
    "a layer of both kinds": (
        {"rename": {"blk.1.attn_gate.weight": "blk.1.attn_q.weight"}},
        "linear_attention and full_attention",
    ),
    "another pattern": ({"full_attention_interval": 2}, "layer 1 full_attention, its tensors .* linear_attention"),
    "a list too short": ({"attention__recurrent_layers": [True, True]}, "tells of 2 layers, there are 4"),
    "too many heads": ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5, but there are only 5 blocks"),
    "a block too many": (
        {"block_count": 4, "nextn_predict_layers": None},
        "tensors of block 4, but metadata tells of 4 blocks",
    ),
    "a layer called a head": (
        {"block_count": 4, "leave_out": r"^blk\.4\."},
        r"block 3 has no tensor nextn\.eh_proj\.weight",
    ),
    "a head nobody counted": ({"nextn_predict_layers": None}, r"block 4 has a tensor nextn\.eh_proj\.weight"),
    "a head alone": ({"leave_out": r"^blk\.[0-3]\."}, "an MTP head without its model"),
    "blocks missing": (
        {"block_count": 7, "nextn_predict_layers": None, "leave_out": r"^blk\.4\."},
        "no tensors of layer 4",
    ),
    "blocks without end": ({"block_count": 2**24}, "16777215 layers, but there are no tensors of layer 5"),
    "no sections": ({"rope__dimension_sections": None}, "dimension_sections"),
    "sections of four": ({"rope__dimension_sections": [8, 8, 8, 8]}, "dimension_sections"),
    "sections that are no numbers": ({"rope__dimension_sections": [float("nan")] * 4}, "dimension_sections"),
    "values of another size": ({"attention__value_length": 8}, "heads of 16 columns"),
    "all rotated and more": ({"rope__dimension_count": 18}, "18 of them rotated"),
    "heads that cannot share": ({"ssm__group_count": 3}, "no multiple of 3"),
    "heads of no size": ({"ssm__inner_size": 127}, "no multiple of 8"),
    "fewer value heads": (
        {"ssm__time_step_rank": 4, "ssm__inner_size": 64},
        r"a\.gguf: tensor \S+ has .*; the file is damaged",
    ),
    "experts in a dense model": ({"expert_count": 4}, "mixture-of-experts"),
    "Ollama, by its metadata": ({"ssm__v_head_reordered": True}, "as Ollama writes it"),
    "Ollama, by its names": ({"rename": {"blk.0.ssm_dt.bias": "blk.0.ssm_dt"}}, "as Ollama writes it"),
    "rotated weights": ({"prism__hadamard__block_size": 1024}, "prism.hadamard"),
    "an unknown tensor": ({"rename": {"blk.0.ssm_norm.weight": "blk.0.ssm_d.weight"}}, "blk.0.ssm_d.weight"),
    "scales beside weights": ({"rename": {"blk.0.ssm_norm.weight": "blk.0.attn_q.scale"}}, "blk.0.attn_q.scale"),
    "an unknown tokenizer": ({"tokenizer__ggml__pre": "martian"}, "martian"),
    "what sees": ({"general__architecture": "clip"}, "without the language model"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("folder"))


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_in_one_line(case: str, folder: Path, tmp_path: Path) -> None:
    changes, message = BAD[case]
    file = write_gguf(tmp_path / "a.gguf", folder, **changes)
    with pytest.raises(ForerunError, match=message) as caught:
        opened(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["ssm_conv1d", "ssm_alpha", "attn_gate", "post_attention_norm", "ffn_down"])
def test_a_missing_tensor_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    done = write_gguf(tmp_path / "a.gguf", folder, leave_out=rf"blk\.0\.{name}")
    with pytest.raises(ForerunError, match=r"tensor model\.layers\.0\..* is missing") as caught:
        load(done, CpuKernels(quantize=False))
    assert "\n" not in str(caught.value)


def test_a_decay_that_grows_is_refused(tmp_path: Path) -> None:
    tensors = load_file((folder := tiny_folder(tmp_path / "folder")) / "model.safetensors")
    name = "model.layers.0.linear_attn.A_log"
    tensors[name][1] = float("-inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", folder))
    with pytest.raises(ForerunError, match=r"blk\.0\.ssm_a must hold negative numbers"):
        checkpoint.take(name, checkpoint.shape(name))
