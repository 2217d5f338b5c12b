"""A head's file: what is rounded in it, who reads it, and a wider head that goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_model

import forerun
from forerun.draft.head import build_head
from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.cpu.tiles import TileMemory, Tiles, pack_exact, pack_rounded
from forerun.kernels.matrix import FloatMatrix, Matrix, TiledMatrix, round_to_int8
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.feed_forward import Dense
from forerun.models.layers.mtp import MtpHead
from forerun.progress import NullProgress
from forerun.train.head import LAYER, Head, Scales
from forerun.train.save import head_config, round_as_saved, save_head
from forerun.train.settings import Settings
from forerun.train.start import Start, load_start
from forerun.train.target import FrozenTarget, load_target
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.heads import read_head

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3)


def random_start(target: FrozenTarget) -> Head:
    """A head none of whose values is a round one."""
    head = Head(target, (1, 2))
    head.start(Scales(2.0, 1.0), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return head


def first_version(head: Head, folder: Path) -> Path:
    """The head as heads were saved before anything in them was in 8 bits."""
    folder.mkdir()
    weights = {name: tensor.detach().bfloat16().contiguous() for name, tensor in head.weights.items()}
    save_file(weights, folder / "head.safetensors")
    (folder / "config.json").write_text(json.dumps(head_config(head) | {"version": 1}))
    return folder


def start_of(target: FrozenTarget, folder: Path, intermediate: int | None = None) -> Start:
    start = load_start(target, Settings(start_from=str(folder), intermediate=intermediate), lambda _: None)
    assert start is not None
    return start


def built(model: Path, folder: Path, kernels: CpuKernels | ReferenceKernels) -> MtpHead:
    decoder = build(open_checkpoint(model), kernels, CPU, torch.float32, NullProgress())
    return build_head(read_head(folder), decoder, 290)


def matrices(head: MtpHead) -> dict[str, Matrix]:
    network = head.block.feed_forward
    assert isinstance(network, Dense) and head.fuse_matrix is not None
    return {
        "gate and up": network.network.gate_up,
        "down": network.network.down,
        "fc": head.fc,
        "fuse": head.fuse_matrix,
    }


def check_tiles(matrix: Matrix, wanted: Tiles) -> None:
    assert isinstance(matrix, TiledMatrix)
    (part,) = matrix.parts
    assert part.name == wanted.name and np.array_equal(part.data, wanted.data)


def test_a_cpu_multiplies_with_the_8_bits_of_the_file(model: Path, tmp_path: Path) -> None:
    head = random_start(load_target(model, CPU))
    save_head(tmp_path / "head", head, None, {}, "")
    found = matrices(built(model, tmp_path / "head", CpuKernels(True)))
    trained = {name.removeprefix(LAYER + "mlp."): weight.detach() for name, weight in head.weights.items()}
    both = torch.cat((trained["gate_proj.weight"], trained["up_proj.weight"]))
    for name, weight in (("gate and up", both), ("down", trained["down_proj.weight"])):
        values, scale = round_to_int8(weight)
        check_tiles(found[name], pack_rounded(values.numpy(), scale.numpy(), TileMemory()))
    for name in ("fc", "fuse"):
        values = trained[f"mtp.{name}.weight"].bfloat16().float()
        check_tiles(found[name], pack_exact(values.numpy(), TileMemory()))


def test_figures_are_those_of_the_values_in_the_file(model: Path, tmp_path: Path) -> None:
    target = load_target(model, CPU)
    head, again = random_start(target), Head(target, (1, 2))
    before = {name: weight.detach().clone() for name, weight in head.weights.items()}
    round_as_saved(head)
    save_head(tmp_path / "head", head, None, {}, "")
    start_of(target, tmp_path / "head").put_into(again, seed=0)
    for name, weight in head.weights.items():
        assert weight.requires_grad and not torch.equal(weight, before[name])
        torch.testing.assert_close(again.weights[name], weight, rtol=1e-6, atol=0)
        torch.testing.assert_close(weight, before[name], rtol=0.004, atol=0.005 * float(before[name].abs().max()))


def test_heads_of_the_first_version_draft_on(model: Path, tmp_path: Path) -> None:
    head = random_start(load_target(model, CPU))
    old = first_version(head, tmp_path / "old")
    save_head(tmp_path / "new", head, None, {}, "")
    sizes = [(folder / "head.safetensors").stat().st_size for folder in (tmp_path / "new", old)]
    assert sizes[0] < 0.8 * sizes[1]
    wanted, found = (matrices(built(model, folder, ReferenceKernels())) for folder in (old, tmp_path / "new"))
    for name, matrix in wanted.items():
        other = found[name]
        assert isinstance(matrix, FloatMatrix) and isinstance(other, FloatMatrix)
        torch.testing.assert_close(other.weight, matrix.weight, rtol=0.01, atol=0.01 * float(matrix.weight.abs().max()))
    plain = forerun.generate(forerun.load(str(model), head=None), "hello", max_tokens=8)
    for folder in (old, tmp_path / "new"):
        answer = forerun.generate(forerun.load(str(model), head=folder), "hello", max_tokens=8, draft="mtp")
        assert answer.tokens == plain.tokens and answer.drafted > 0 and not answer.warnings


@pytest.mark.parametrize("biased", [False, True])
def test_a_wider_head_drafts_at_first_as_the_one_it_started_from(biased: bool, tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "llama", num_hidden_layers=3, mlp_bias=biased)
    target = load_target(source, CPU)
    save_head(tmp_path / "head", random_start(target), None, {}, "")
    narrow, wide = Head(target, (1, 2)), Head(target, (1, 2), 160)
    for head, asked in ((narrow, None), (wide, 160)):
        start_of(target, tmp_path / "head", asked).put_into(head, seed=3)
    gate, down = (wide.weights[f"{LAYER}mlp.{name}_proj.weight"].detach() for name in ("gate", "down"))
    assert gate.shape == (160, 64) and float(gate[112:].std()) > 0.01 and not bool(down[:, 112:].any())
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 9, 3, 64, generator=generator)
    following = torch.randint(4, 290, (2, 11), generator=generator)
    for ours, theirs in zip(*(head.unroll(features, following, 3) for head in (wide, narrow)), strict=True):
        torch.testing.assert_close(ours, theirs)
