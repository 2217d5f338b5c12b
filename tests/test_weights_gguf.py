"""GGUF: a file holds the model that went in; lying files are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import gguf_values, opened, tiny_gguf, tiny_model, tiny_tokenizer

from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.formats import FORMATS
from forerun.kernels.matrix import Parts, as_tensor
from forerun.text.chat import encode_chat
from forerun.weights import gguf_checkpoint
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.generation_config import suppressed_tokens
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.gguf_config import config_from, llama3_factors
from forerun.weights.gguf_header import GgufHeader, read_header
from forerun.weights.tokenizer import load_tokenizer, stop_token_ids

gguf = pytest.importorskip("gguf")

ODD = {"hidden_size": 72, "intermediate_size": 88, "num_attention_heads": 6, "head_dim": 20}
QUANTISED = {"intermediate_size": 128}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a GGUF file."""
    folder = tmp_path_factory.mktemp("source")
    return tiny_gguf(folder / "tiny.gguf", tiny_model(folder / "model", "llama", **QUANTISED), kind="Q8_0")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", ODD),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {}),
        ("qwen3", ODD),
    ],
)
def test_round_trip_is_exact(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = tiny_model(tmp_path / "model", family, **options)
    window: dict[str, Any] = {"llama__attention__sliding_window": 16} if family == "mistral" else {}
    file = tiny_gguf(tmp_path / "a.gguf", model, **window)

    before, after = load_file(model / "model.safetensors"), gguf_values(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    wanted = json.loads((model / "config.json").read_text())
    found = open_checkpoint(file).config
    ours = found.keys() - {"head_dim"} if "head_dim" not in wanted else found.keys()
    for key in ours - ({"attention_bias", "mlp_bias"} - wanted.keys()):
        assert found[key] == wanted[key], key


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices_come_back_as_gguf_reads_them(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path / "model", "llama", **QUANTISED)
    file = tiny_gguf(tmp_path / "a.gguf", model, kind=kind)
    code = gguf.GGMLQuantizationType[kind]
    dtype = torch.bfloat16 if kind == "BF16" else torch.float16
    before, after, checkpoint = load_file(model / "model.safetensors"), gguf_values(file), open_checkpoint(file)
    for name, tensor in before.items():
        if tensor.ndim == 1:
            assert torch.equal(after[name], tensor)
            continue
        # Rows are quantised one by one: the order in which the file holds them must not matter.
        wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), code), code))
        assert after[name].dtype == dtype
        assert torch.equal(after[name], wanted.to(dtype)), name
        weight = checkpoint.weight(name, tuple(tensor.shape))
        assert isinstance(weight, Parts) and [part.format.name for part in weight.parts] == [kind.lower()]
        assert torch.equal(weight.float(), wanted), "as stored, and in Hugging Face's order"
        assert torch.equal(weight[torch.tensor([3, 0, 3])].float(), wanted[[3, 0, 3]])


DEQUANTISABLE = [
    kind.name for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits and kind.name != "BF16"
]


@pytest.mark.parametrize("kind", DEQUANTISABLE)
def test_every_type_gguf_can_dequantise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(gguf_checkpoint, "PIECE_VALUES", 1024)  # several pieces
    code = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[code]
    # Bytes below 64 keep every 16-bit scale in them finite.
    data = np.random.default_rng(5).integers(0, 64, (7, 512 // block * size), dtype=np.uint8)
    checkpoint = one_tensor(tmp_path / "a.gguf", data, code)
    found = checkpoint.raw("model.embed_tokens.weight")
    wanted = torch.from_numpy(gguf.quants.dequantize(data, code))
    assert found.shape == (7, 512) and checkpoint.number_format("model.embed_tokens.weight") == kind
    fits = wanted.abs().max() <= 65504
    assert torch.equal(found, wanted.to(torch.float16) if fits else wanted)
    assert wanted.abs().max() > 0
    weight, known = checkpoint.weight("model.embed_tokens.weight", (7, 512)), kind.lower() in FORMATS
    assert isinstance(weight, Parts) == known
    if known:
        assert torch.equal(weight.float(), wanted)
    else:
        assert torch.equal(as_tensor(weight), found)
        assert checkpoint.notes == [
            f"model.embed_tokens.weight is decoded when loaded: there is no product with {kind}"
        ]


def one_tensor(file: Path, data: np.ndarray, code: int) -> GgufCheckpoint:
    """A file with an embedding alone."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufCheckpoint(file, {"num_hidden_layers": 1})


def test_values_too_large_for_float16_stay_float32(tmp_path: Path) -> None:
    big = np.full((2, 32), 100000.0, np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    found = one_tensor(tmp_path / "x.gguf", gguf.quants.quantize(big, kind), kind).raw("model.embed_tokens.weight")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.from_numpy(big), rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_values_that_are_no_numbers_are_refused(kind: str, value: float, tmp_path: Path) -> None:
    """One among many, in the last block: a matrix of floats, or the 16-bit scale that a block begins with."""
    code = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(np.ones((3, 64), np.float32), code).reshape(3, -1).view(np.uint8).copy()
    if kind == "BF16":
        spoilt = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        spoilt = np.array([value], np.float32 if kind == "F32" else np.float16)
    begins = data.shape[1] - gguf.GGML_QUANT_SIZES[code][1]
    data[-1, begins : begins + spoilt.nbytes] = spoilt.view(np.uint8)
    checkpoint = one_tensor(tmp_path / "x.gguf", data, code)
    for read in (checkpoint.take, checkpoint.weight, lambda name, shape: checkpoint.raw(name)):
        with pytest.raises(ForerunError, match=r"damaged: tensor token_embd\.weight holds infinity or NaN"):
            read("model.embed_tokens.weight", (3, 64))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ3_S"])
def test_scales_that_are_no_numbers_are_found_wherever_a_block_has_them(kind: str, tmp_path: Path) -> None:
    code = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[code]
    sound = np.random.default_rng(5).integers(0, 64, (1, 256 // block * size), dtype=np.uint8)
    missed = []
    for place in range(size):
        data = sound.copy()
        data[0, place] = 255 if kind == "MXFP4" else 0x7C
        with np.errstate(all="ignore"):
            broken = not np.isfinite(gguf.quants.dequantize(data, code)).all()
        checkpoint = one_tensor(tmp_path / "x.gguf", data, code)
        try:
            checkpoint.weight("model.embed_tokens.weight", (1, 256))
            missed += [place] * broken
        except ForerunError:
            assert broken
    assert not missed


def test_large_models_are_written_in_shards(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gguf_values(source)
    monkeypatch.setattr("forerun.weights.folder.FILE_BYTES", 40_000)
    checkpoint = open_checkpoint(convert(str(source), tmp_path / "parts").folder)
    assert len(list(checkpoint.path.glob("model-*.safetensors"))) > 2
    assert checkpoint.names() == whole.keys()
    assert all(torch.equal(checkpoint.take(name, tuple(whole[name].shape)), whole[name]) for name in whole)


def test_header_agrees_with_the_gguf_package(source: Path) -> None:
    header, oracle = read_header(source), gguf.GGUFReader(source)
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in oracle.tensors]
    for ours, theirs in zip(header.tensors, oracle.tensors, strict=True):
        assert (ours.offset, ours.size, ours.kind) == (theirs.data_offset, theirs.n_bytes, theirs.tensor_type)
        assert list(reversed(ours.shape)) == theirs.shape.tolist()
    for key, value in header.metadata.items():
        found = oracle.fields[key].contents()
        if isinstance(found, list):
            assert value in (tuple(found), len(found))
        else:
            assert value == found


def test_tokenizer_chat_template_and_ends_come_along(tmp_path: Path, source: Path) -> None:
    before, after = tiny_tokenizer(), load_tokenizer(source)
    text = "the thing 漢字 😀  12 and<|im_end|>"
    assert after.encode(text) == before.encode(text)
    assert after.decode(after.encode(text)) == text
    chat = [{"role": "user", "content": "hello"}]
    assert encode_chat(after, chat).ids == encode_chat(before, chat).ids
    assert stop_token_ids(source, after) == {2}
    folder = convert(str(source), tmp_path / "folder").folder
    saved = load_tokenizer(folder)
    assert saved.backend_tokenizer.to_str() == after.backend_tokenizer.to_str()
    assert saved.special_tokens_map == after.special_tokens_map and saved.chat_template == after.chat_template
    assert stop_token_ids(folder, saved) == {2}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_tokens_of_qwen_are_those_of_its_own_files(tmp_path: Path, family: str) -> None:
    """Two tokens end an answer, fill-up ids never come, and characters are composed first."""
    model = tiny_model(tmp_path / "model", family)
    known, rows = len(tiny_tokenizer()), json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = [*tiny_tokenizer().convert_ids_to_tokens(range(known)), *(f"[PAD{id}]" for id in range(known, rows))]
    kinds = [3] * 4 + [1] * (known - 4) + [5] * (rows - known)
    metadata: dict[str, Any] = {"tokenizer__ggml__pre": "qwen2", "tokenizer__ggml__tokens": tokens}
    file = tiny_gguf(tmp_path / "a.gguf", model, **metadata, tokenizer__ggml__token_type=kinds)
    tokenizer = load_tokenizer(file)
    assert stop_token_ids(file, tokenizer) == {0, 2}
    assert suppressed_tokens(file) == set(range(known, rows)) != set()
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")


def test_a_tokenizer_beside_the_file_is_not_taken_for_its_own(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    file = tiny_gguf(model / "a.gguf", model)
    (model / "tokenizer.json").write_text("not a tokenizer")
    assert load_tokenizer(file).encode("the") == tiny_tokenizer().encode("the")


@pytest.mark.parametrize("space", [None, True, False])
def test_a_sentencepiece_tokenizer_keeps_its_begin_token_and_first_space(tmp_path: Path, space: bool | None) -> None:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "▁he", "llo", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    file = tiny_gguf(
        tmp_path / "a.gguf",
        tiny_model(tmp_path / "model", "llama"),
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[-float(index) for index in range(len(tokens))],
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
        tokenizer__ggml__merges=None,
        tokenizer__ggml__add_bos_token=None,
        tokenizer__ggml__add_space_prefix=space,
    )
    tokenizer = load_tokenizer(file)
    for text in ("hello hello\n", *([" hello"] if space is False else [])):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    found = tokenizer.convert_ids_to_tokens(tokenizer.encode("hello hello\n"))
    assert found == ["<s>", *(["he", "llo"] if space is False else ["▁hello"]), "▁hello", "<0x0A>"]


def test_smollm_splits_digits_off_spaces(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    plain = load_tokenizer(tiny_gguf(tmp_path / "a.gguf", model))
    smol_file = tiny_gguf(tmp_path / "b.gguf", model, tokenizer__ggml__pre="smollm")
    smol = load_tokenizer(smol_file)
    split = [piece for piece, _ in smol.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert split == ["a", "ĠĠ", "1", "2"]
    assert [piece for piece, _ in plain.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")] == ["a", "Ġ", "Ġ12"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__pre": "martian"}, "martian"),
        ({"general__architecture": "mamba"}, "mamba"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"llama__attention__head_count": 0}, "head_count"),
        ({"llama__block_count": 1}, "blk.1"),
        ({"llama__attention__key_length": 32, "llama__attention__value_length": 32}, r"a\.gguf: tensor blk\.\d\.attn_"),
        ({"split__count": 3}, "llama-gguf-split"),
        ({"llama__attention__scale": 1.0}, "metadata llama.attention.scale changes what a model computes"),
        ({"llama__logit_scale": 8.0}, "metadata llama.logit_scale changes what a model computes"),
        ({"llama__rope__scaling__attn_factor": 0.5}, "rope.scaling.attn_factor changes what a model computes"),
        ({"llama__attention__causal": False}, "attention.causal"),
        ({"tokenizer__chat_template": 5}, "metadata tokenizer.chat_template must be text, found 5"),
        ({"llama__feed_forward_length": "x" * 3000}, r"feed_forward_length must be a whole number .*, found 'x{39}$"),
    ],
)
def test_files_not_read_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    if "llama__attention__key_length" in metadata:
        metadata = metadata | {"llama__rope__dimension_count": 32}
    file = tiny_gguf(tmp_path / "a.gguf", tiny_model(tmp_path / "model", "llama"), **metadata)
    with pytest.raises(ForerunError, match=message) as caught:
        opened(file)
    assert "\n" not in str(caught.value)


def test_rope_scaling_is_read(source: Path) -> None:
    header = read_header(source)

    def rope(extra: dict[str, Any], factors: list[float] | None = None) -> dict[str, Any]:
        changed = GgufHeader(header.metadata | extra, header.tensors)
        found: dict[str, Any] = config_from(changed, "x", factors)["rope_parameters"]
        return found

    scaling = "llama.rope.scaling"
    assert rope({f"{scaling}.type": "linear", f"{scaling}.factor": 2.0})["factor"] == 2.0
    assert rope({f"{scaling}.factor": 2.0}) == rope({f"{scaling}.type": "linear", f"{scaling}.factor": 2.0})
    assert rope({f"{scaling}.type": "none", f"{scaling}.factor": 2.0}) == rope({})
    yarn = rope({f"{scaling}.type": "yarn", f"{scaling}.factor": 4.0, f"{scaling}.original_context_length": 128})
    assert yarn["rope_type"] == "yarn" and yarn["original_max_position_embeddings"] == 128
    extra = {"llama.rope.freq_base": 500000.0}
    factors = llama3_factors(500000.0, 16, 8.0)
    assert rope(extra, factors)["rope_type"] == "llama3" and rope(extra, factors)["factor"] == 8.0
    with pytest.raises(ForerunError, match="rope_freqs"):
        rope(extra, [1.0] * 7 + [9.0])


def test_llama3_factors_match_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=parameters
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(plain / scaled, torch.tensor(llama3_factors(500000.0, 128, 8.0)), rtol=1e-4, atol=0)


@pytest.mark.real
def test_the_built_in_model_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from forerun.weights.find import built_in_file

    file = built_in_file("smollm2")
    checkpoint = open_checkpoint(file)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config))
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)
    assert checkpoint.names() == loaded["tensors"].keys()
    for name, wanted in loaded["tensors"].items():
        found = checkpoint.take(name, tuple(wanted.shape))
        assert torch.equal(found, wanted.to(found.dtype)), name
    checkpoint.finish(lambda name: False)
    for key in ("rms_norm_eps", "hidden_size", "num_key_value_heads", "tie_word_embeddings", "vocab_size"):
        assert checkpoint.config[key] == pytest.approx(loaded["config"][key]), key
    tokenizer = load_tokenizer(checkpoint.path)
    assert stop_token_ids(checkpoint.path, tokenizer) == {2}
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
