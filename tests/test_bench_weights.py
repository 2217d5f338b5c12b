"""What the benchmarks say a step has to read: of a mixture of experts only those that rows are sent to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_gemma import tiny_gemma
from tiny_qwen import tiny_qwen

from forerun.bench.step_weights import chosen_experts, pass_bytes, step_matrices
from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.interface import Kernels, Stacked
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")


class StackingKernels(ReferenceKernels):
    """Packs experts as a GPU's bodies do."""

    def pack_experts(self, experts):  # type: ignore[no-untyped-def]
        parts = [(expert.gate_up.weight, expert.down.weight) for expert in experts]
        return Stacked(*(torch.stack(stack) for stack in zip(*parts, strict=True)))


def decoder(folder: Path, kernels: Kernels) -> Decoder:
    return build(open_checkpoint(folder), kernels, CPU, torch.float32, NullProgress())


@pytest.mark.parametrize("kernels", [ReferenceKernels, StackingKernels])
def test_a_row_reads_the_experts_it_goes_to(kernels: type[ReferenceKernels], tmp_path: Path) -> None:
    """Three of six in every layer, 48 columns in, 40 inside."""
    model = decoder(tiny_gemma(tmp_path, "26B-A4B"), kernels())
    step = sum(matrix.bytes for matrix in step_matrices(model))
    every = model.head.bytes + sum(matrix.bytes for matrix in model.block_matrices())
    expert = 4 * 3 * 40 * 48
    layers = len(model.layers)
    assert every - step == layers * 3 * expert
    assert pass_bytes(model, [3] * layers) == step
    assert pass_bytes(model, [6] * layers) == every
    assert pass_bytes(model, [4] * layers) == step + layers * expert
    # The dense part by hand: three layers with a window, one without whose values are its keys.
    window = 4 * (4 + 2 + 2) * 16 * 48 + 4 * 48 * 4 * 16
    full = 4 * (4 + 1 + 1) * 32 * 48 + 4 * 48 * 4 * 32
    each = 4 * (6 * 48 + 3 * 80 * 48) + 3 * expert  # router, network, experts
    assert step == 3 * window + full + 4 * each + 4 * 300 * 48


def test_a_dense_model_reads_all_it_has(tmp_path: Path) -> None:
    model = decoder(tiny_gemma(tmp_path, "E4B"), ReferenceKernels())
    every = model.head.bytes + sum(matrix.bytes for matrix in model.block_matrices())
    assert sum(matrix.bytes for matrix in step_matrices(model)) == pass_bytes(model, []) == every


def test_experts_with_a_shared_one(tmp_path: Path) -> None:
    model = decoder(tiny_qwen(tmp_path, sparse=True), ReferenceKernels())
    mixture = model.layers[0].mixture
    assert mixture is not None and isinstance(mixture.experts, list)
    unread = len(mixture.experts) - mixture.top
    expert = mixture.experts[0].gate_up.bytes + mixture.experts[0].down.bytes
    every = model.head.bytes + sum(matrix.bytes for matrix in model.block_matrices())
    assert every - sum(matrix.bytes for matrix in step_matrices(model)) == len(model.layers) * unread * expert > 0


@torch.inference_mode()
def test_the_experts_of_a_pass_are_counted(tmp_path: Path) -> None:
    model = decoder(tiny_gemma(tmp_path, "26B-A4B"), ReferenceKernels())
    pool = PagePool.for_model(model.config, 4, 16, torch.float32, CPU)
    counts = []
    for tokens in ([7], [7, 7], [7, 11, 90, 23, 5, 61, 40, 2]):
        cache = SequenceCache(pool)
        cache.grow(len(tokens))
        batch = make_pass([(cache, tokens)], last_only=False)
        counts.append(chosen_experts(model, lambda batch=batch: model.forward(batch)))
        cache.release()
    assert counts[0] == [3] * 4
    assert counts[1][0] == 3  # the same token twice: the first layer sees the same row, up to its position
    assert all(3 <= count <= 6 for count in counts[2]) and max(counts[2]) > 3
    assert "route" not in vars(model.kernels)
