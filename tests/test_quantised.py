"""Quantised safetensors as people publish them, made on the spot: the model of a folder with the decoded values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import load, run
from tiny import tiny_model
from tiny_qwen import random_model, save_model

import forerun
from forerun.cache.pages import PagePool, SequenceCache
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.matrix import Parts
from forerun.weights.checkpoint import open_checkpoint

TOKENS = torch.randint(4, 280, (24,), generator=torch.Generator().manual_seed(1)).tolist()
Tensors = dict[str, torch.Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
SPARSE = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = load(folder, CpuKernels(quantize=False))
    cache = SequenceCache(PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu")))
    return torch.cat([run(model, cache, TOKENS[:16], True), run(model, cache, TOKENS[16:], False)])


def rewrite(source: Path, target: Path, tensors: Tensors, **config: Any) -> Path:
    """The folder with other weights."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    found = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(found))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def packed(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes of a row one after another, the lowest bits first, in 32-bit words."""
    rows = codes.reshape(-1, codes.shape[-1])
    stream = (rows[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(rows), -1)
    words = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    return torch.from_numpy(words.reshape(*codes.shape[:-1], -1).copy())


def affine(values: torch.Tensor, bits: int, group: int) -> tuple[Tensors, torch.Tensor]:
    """As MLX stores a matrix, and what that says."""
    grouped = values.double().reshape(*values.shape[:-1], -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales, biases = ((high - low) / (2**bits - 1)).clamp_min(1e-6).to(torch.bfloat16), low.to(torch.bfloat16)
    codes = ((grouped - biases[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1).numpy().astype(np.int64)
    said = scales.float()[..., None] * torch.from_numpy(codes).float() + biases.float()[..., None]
    raw = packed(codes.reshape(values.shape), bits)
    return {"weight": raw, "scales": scales, "biases": biases}, said.reshape(values.shape)


def mlx(tensors: Tensors, bits: Callable[[str], tuple[int, int]]) -> tuple[Tensors, Tensors]:
    """Names and values as MLX writes them, and the same model as Hugging Face would have it."""
    written, said = {}, dict(tensors)
    for name, tensor in tensors.items():
        place = name.replace("model.language_model.", "model.")
        place = place.replace(".mlp.experts.", ".mlp.switch_mlp.") + ".weight" * (".mlp.experts." in name)
        place = place if place.startswith(("mtp.", "vision")) else "language_model." + place
        if name.endswith("conv1d.weight"):
            written[place] = tensor.movedim(2, 1)
        elif tensor.ndim == 1 and "norm" in name and "linear_attn" not in name:
            written[place] = tensor + 1
            said[name] = written[place] - 1
        elif tensor.ndim >= 2 and tensor.shape[-1] % bits(place)[1] == 0:
            parts, said[name] = affine(tensor, *bits(place))
            written |= {f"{place.removesuffix('.weight')}.{part}": stored for part, stored in parts.items()}
        else:
            written[place] = tensor
    return written, said


def split_experts(tensors: Tensors) -> Tensors:
    """Gates and ups apart."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_model_that_mlx_wrote(sparse: bool, shifted: bool, tmp_path: Path) -> None:
    """Matrices of two widths, another axis of the convolutions, shifted norms; a head shifted as well, or not."""
    folder = save_model(tmp_path / "m", random_model(sparse, **(SPARSE if sparse else SIZES)), nested=True)
    tensors = split_experts(load_file(folder / "model.safetensors"))
    tensors = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    own = {"language_model.model.layers.1.mlp.gate": {"group_size": 32, "bits": 8}}
    own["language_model.lm_head"] = {"group_size": 64, "bits": 6}

    def bits(name: str) -> tuple[int, int]:
        special = own.get(name.removesuffix(".weight"), {"group_size": 32, "bits": 4})
        return special["bits"], special["group_size"]

    written, said = mlx(tensors, bits)
    if not shifted:  # a converter that leaves the head alone
        for name in [name for name in tensors if name.startswith("mtp.") and "norm" in name]:
            written[name] = said[name] = tensors[name]
    written["vision_tower.blocks.0.weight"] = torch.ones(2, 2)
    scheme = {"group_size": 32, "bits": 4, "mode": "affine"} | own
    made = rewrite(folder, tmp_path / "mlx", written, quantization=scheme, quantization_config=scheme)
    plain = rewrite(folder, tmp_path / "plain", said)
    checkpoint = open_checkpoint(made)
    assert checkpoint.notes == [] and checkpoint.number_format("lm_head.weight") == "MLX (4 bit)"
    weight = checkpoint.weight(
        "model.layers.0.mlp.shared_expert.up_proj.weight" if sparse else "model.layers.0.mlp.up_proj.weight",
        (64 if sparse else 96, 64),
    )
    assert isinstance(weight, Parts) and weight.parts[0].format.name == "mlx4_32" and weight.dtype == torch.bfloat16
    for name, wanted in said.items():
        name = name.replace("language_model.", "")
        for read in (checkpoint.floats, checkpoint.take):
            assert torch.equal(read(name, tuple(wanted.shape)).float(), wanted.float()), name
    checkpoint.finish(lambda name: False)
    assert torch.equal(logits(made), logits(plain))
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 3.0, "seed": 1, "draft": "mtp", "draft_tokens": 2}
    found, theirs = (
        forerun.generate(forerun.load(str(each), quantize="none"), TOKENS, **asked) for each in (made, plain)
    )
    assert found.drafted > 0 and (found.tokens, found.accepted) == (theirs.tokens, theirs.accepted)
    model = forerun.load(str(made))  # multiplied as it is stored
    drafted = forerun.generate(model, TOKENS, **asked)
    assert drafted.drafted > 0 and drafted.tokens == forerun.generate(model, TOKENS, **asked | {"draft": "off"}).tokens


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (5, 32), (6, 64), (8, 32)])
def test_every_width_of_mlx(bits: int, group: int, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    written, said = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        said[name] = tensor
        if tensor.ndim == 2:
            parts, said[name] = affine(tensor, bits, group)
            written |= {name.replace("weight", part): stored for part, stored in parts.items()}
        else:
            written[name] = tensor
    made = rewrite(folder, tmp_path / "mlx", written, quantization={"group_size": group, "bits": bits})
    plain = rewrite(folder, tmp_path / "plain", said)
    assert torch.equal(logits(made), logits(plain))
    copied = convert(str(made), tmp_path / "copy").folder
    assert "quantization" not in json.loads((copied / "config.json").read_text())
    torch.testing.assert_close(logits(copied), logits(plain), atol=0.02, rtol=0)


def test_plain_floats_of_mlx(tmp_path: Path) -> None:
    """Nothing is quantised, and the axis and the norms are moved all the same."""
    folder = save_model(tmp_path / "m", random_model(False), head=False)
    written, said = mlx(load_file(folder / "model.safetensors"), lambda name: (4, 1 << 20))
    made, plain = rewrite(folder, tmp_path / "mlx", written), rewrite(folder, tmp_path / "plain", said)
    assert torch.equal(logits(made), logits(plain))


def spoilt(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Tensors:
    found = change(tensors[name])
    return {each: tensor for each, tensor in tensors.items() if each != name} | ({} if found is None else {name: found})


UP = "model.layers.0.mlp.up_proj."
LYING: dict[str, Any] = {
    "no biases": ("biases", lambda t: None),
    "fewer scales": ("scales", lambda t: t[:, :1]),
    "words of another kind": ("weight", lambda t: t.view(torch.int32)),
    "scales in whole numbers": ("scales", lambda t: t.to(torch.int32)),
    "fewer rows": ("weight", lambda t: t[:-1]),
}


@pytest.mark.parametrize("case", [*LYING, "infinity", "a width that is none", "another mode"])
def test_what_contradicts_itself_is_one_line(case: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama", hidden_size=64, intermediate_size=128)
    tensors = load_file(folder / "model.safetensors")
    parts, _ = affine(tensors.pop(UP + "weight"), 4, 32)
    tensors |= {UP + part: stored for part, stored in parts.items()}
    scheme: dict[str, Any] = {"group_size": 32, "bits": 7 if case == "a width that is none" else 4}
    match = r"tensors of model\.layers\.0\.mlp\.up_proj do not fit each other or config\.json \(MLX"
    if case in LYING:
        tensors = spoilt(tensors, UP + LYING[case][0], LYING[case][1])
    elif case == "infinity":
        tensors[UP + "scales"][1, 1] = torch.inf
        match = r"up_proj\.scales holds infinity"
    elif case == "another mode":
        scheme["mode"], match = "mxfp4", r"quantised with MLX \(mxfp4\), which is not read"
    made = rewrite(folder, tmp_path / "mlx", tensors, quantization=scheme)
    with pytest.raises(ForerunError, match=match) as caught:
        open_checkpoint(made).weight(UP + "weight", (128, 64))
    assert "\n" not in str(caught.value)


def as_words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] → int32 [rows, words]: column j of a word in the bits from places[j] · bits on."""
    each = 32 // bits
    shifts = np.array(places or range(each), np.uint64) * np.uint64(bits)
    grouped = codes.astype(np.uint64).reshape(len(codes), -1, each) << shifts
    return torch.from_numpy(grouped.sum(-1).astype(np.uint32).view(np.int32))


def gptq(values: torch.Tensor, bits: int, group: int, shuffled: bool, version: int) -> tuple[Tensors, torch.Tensor]:
    chance = np.random.default_rng(len(values))
    outputs, inputs = values.shape
    codes = chance.integers(0, 2**bits, (inputs, outputs))
    zeros = chance.integers(1, 2**bits, (inputs // group, outputs))
    scales = torch.from_numpy(chance.normal(0.0, 0.02, zeros.shape)).half()
    order = chance.permutation(inputs) if shuffled else np.arange(inputs)
    groups = order // group
    stored = {
        "qweight": as_words(np.ascontiguousarray(codes.T), bits).T,
        "qzeros": as_words(zeros - (version == 1), bits),
        "scales": scales,
    }
    if shuffled:
        stored["g_idx"] = torch.from_numpy(groups).int()
    stored["bias"] = torch.zeros(outputs)
    said = scales.float()[groups] * torch.from_numpy(codes - zeros[groups]).float()
    return stored, said.T.contiguous()


def awq(values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    chance = np.random.default_rng(len(values))
    outputs, inputs = values.shape
    codes, zeros = chance.integers(0, 16, (inputs, outputs)), chance.integers(0, 16, (inputs // 32, outputs))
    scales = torch.from_numpy(chance.normal(0.0, 0.02, zeros.shape)).half()
    # Columns 0, 2, 4, 6, 1, 3, 5, 7 lie from the lowest bits up.
    places = tuple((0, 2, 4, 6, 1, 3, 5, 7).index(column) for column in range(8))
    stored = {"qweight": as_words(codes, 4, places), "qzeros": as_words(zeros, 4, places), "scales": scales}
    groups = np.arange(inputs) // 32
    return stored, (scales.float()[groups] * torch.from_numpy(codes - zeros[groups]).float()).T.contiguous()


def compressed(values: torch.Tensor, bits: int, group: int | None, zero: bool) -> tuple[Tensors, torch.Tensor]:
    chance = np.random.default_rng(len(values))
    outputs, inputs = values.shape
    half, each = 1 << bits - 1, group or inputs
    codes = chance.integers(-half, half, (outputs, inputs))
    scales = torch.from_numpy(chance.normal(0.0, 0.02, (outputs, inputs // each))).bfloat16()
    zeros = chance.integers(-half, half, scales.shape) * zero
    stored = {"weight_packed": as_words(codes + half, bits), "weight_scale": scales}
    stored["weight_shape"] = torch.tensor([outputs, inputs])
    if zero:
        stored["weight_zero_point"] = as_words(np.ascontiguousarray((zeros + half).T), bits).T
    spread = [np.repeat(factors, each, 1) for factors in (scales.float().numpy(), zeros)]
    return stored, torch.from_numpy(spread[0] * (codes - spread[1]).astype(np.float32))


def block_floats(values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    chance = torch.Generator().manual_seed(len(values))
    scales = torch.rand(-(-len(values) // 48), -(-values.shape[1] // 32), generator=chance) / 50
    stored = {"weight": (torch.randn(values.shape, generator=chance) * 5).to(torch.float8_e4m3fn)}
    spread = scales.repeat_interleave(48, 0).repeat_interleave(32, 1)[: values.shape[0], : values.shape[1]]
    return stored | {"weight_scale_inv": scales}, stored["weight"].float() * spread


def row_floats(values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    chance = torch.Generator().manual_seed(len(values))
    stored = {"weight": (torch.randn(values.shape, generator=chance) * 5).to(torch.float8_e4m3fn)}
    scales = (torch.rand(len(values), 1, generator=chance) / 50).bfloat16()
    return stored | {"weight_scale": scales, "input_scale": torch.ones(1)}, stored["weight"].float() * scales.float()


def packed_scheme(bits: int, form: str = "pack-quantized") -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


SCHEMES: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "GPTQ": (lambda t: gptq(t, 4, 32, False, 1), {"quant_method": "gptq", "bits": 4}),
    "GPTQ, 8 bits": (lambda t: gptq(t, 8, 32, False, 1), {"quant_method": "gptq", "bits": 8}),
    "GPTQ, shuffled, second version": (
        lambda t: gptq(t, 4, 32, True, 2),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "packed": (lambda t: compressed(t, 4, 32, False), packed_scheme(4)),
    "packed, by rows": (lambda t: compressed(t, 8, None, False), packed_scheme(8)),
    "packed, with zeros": (lambda t: compressed(t, 4, 32, True), packed_scheme(4)),
    "8-bit floats, by rows": (row_floats, packed_scheme(8, "float-quantized")),
    "8-bit floats, by blocks": (block_floats, {"quant_method": "fp8", "weight_block_size": [48, 32]}),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_what_others_quantised_is_decoded_when_it_is_loaded(case: str, tmp_path: Path) -> None:
    encode, scheme = SCHEMES[case]
    folder = tiny_model(tmp_path / "m", "qwen2", hidden_size=64, intermediate_size=96)
    written, said = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        said[key] = tensor
        if key.endswith("_proj.weight"):
            parts, said[key] = encode(tensor)
            base = key.removesuffix("weight")
            parts = {part: each for part, each in parts.items() if part != "bias" or ".mlp." in key}
            written |= {base + part: each for part, each in parts.items()}
        else:
            written[key] = tensor
    made = rewrite(folder, tmp_path / "made", written, quantization_config=scheme)
    plain = rewrite(folder, tmp_path / "plain", said)
    checkpoint = open_checkpoint(made)
    for key, wanted in said.items():
        assert torch.equal(checkpoint.floats(key, tuple(wanted.shape)), wanted), key
    checkpoint.finish(lambda key: False)
    (note,) = checkpoint.notes
    assert note.startswith("14 tensors (") and "are decoded when loaded" in note
    assert torch.equal(logits(made), logits(plain))
    with pytest.raises(ForerunError, match="quantised already"):
        convert(str(made), tmp_path / "small", quantize="int8")
    # Cut tensors: one line, whatever is missing.
    for key in [key for key in written if key.startswith(UP) and not key.endswith(("bias", "input_scale"))]:
        for change in (lambda t: None, lambda t: t[:-1]):
            broken = rewrite(
                folder,
                tmp_path / f"b{len(list(tmp_path.iterdir()))}",
                spoilt(written, key, change),
                quantization_config=scheme,
            )
            with pytest.raises(ForerunError) as caught:
                opened = open_checkpoint(broken)
                opened.floats(UP + "weight", (96, 64))
                opened.finish(lambda key: False)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
@pytest.mark.parametrize("sparse", [False, True])
def test_conversion_to_blocks(form: str, sparse: bool, tmp_path: Path) -> None:
    import gguf

    code = gguf.GGMLQuantizationType[form.upper()]
    folder = save_model(tmp_path / "m", random_model(sparse, **(SPARSE if sparse else SIZES)), nested=True)
    done = convert(str(folder), tmp_path / "new", quantize=form)
    stored, before = load_file(done.folder / "model.safetensors"), load_file(folder / "model.safetensors")
    config = json.loads((done.folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "forerun-blocks", "format": form}
    checkpoint, said, blocks = open_checkpoint(done.folder), dict(before), 0
    for name, tensor in before.items():
        if stored[name].dtype == torch.uint8:
            blocks += 1
            quantised = gguf.quants.quantize(tensor.numpy(), code)
            assert np.array_equal(stored[name].numpy(), quantised)
            said[name] = torch.from_numpy(gguf.quants.dequantize(quantised, code))
            weight = checkpoint.weight(name, tuple(tensor.shape))
            assert isinstance(weight, Parts) and torch.equal(weight.float(), said[name])
    assert blocks > 10 and stored["mtp.fc.weight"].dtype == torch.float32
    assert checkpoint.notes == []
    plain = rewrite(folder, tmp_path / "plain", said)
    assert torch.equal(logits(done.folder), logits(plain))
    again = convert(str(done.folder), tmp_path / "again").folder
    copied = load_file(again / "model.safetensors")
    assert stored.keys() == copied.keys() and all(torch.equal(stored[name], copied[name]) for name in stored)
    assert torch.equal(logits(again), logits(plain))
    asked: dict[str, Any] = {"max_tokens": 12, "draft": "mtp", "draft_tokens": 2}
    found, theirs = (
        forerun.generate(forerun.load(str(each), quantize="none"), TOKENS, **asked) for each in (done.folder, plain)
    )
    assert found.drafted > 0 and found.tokens == theirs.tokens
