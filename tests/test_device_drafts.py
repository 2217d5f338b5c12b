"""Drafts of the head for sequences that are not equally far, in the uniform passes of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_engines import DEVICE, attach, tiny_folder, tiny_head

from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import FollowShape, Want
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu import attention
from forerun.models.families import build
from forerun.progress import NullProgress
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams
from forerun.sample.row import Row
from forerun.weights.checkpoint import open_checkpoint

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)")]
TEXTS = {1: [5, 6, 7, 8, 9], 2: [40, 41], 3: [90, 80, 70]}  # 4, 1 and 2 slots to catch up


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MtpDrafter:
    if DEVICE.type == "cpu":  # the interpreter is slow
        monkeypatch.setattr(attention, "splits", lambda kv_heads: 2)
    folder = tiny_folder(tmp_path / "m")
    model = build(open_checkpoint(folder), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    return attach(tiny_head(tmp_path / "h", folder), model)


def follow(drafter: MtpDrafter, sequence: int) -> Want:
    """A sequence with random features of all its positions but the last."""
    tokens = TEXTS[sequence]
    drafter.open(sequence, tokens)
    noise = torch.randn(len(tokens) - 1, 64, generator=torch.Generator().manual_seed(sequence))
    drafter.feed(sequence, noise.to(DEVICE))
    return Want(sequence, 2, Row(SamplingParams(), TokenHistory(tokens), (), len(tokens)), False)


@torch.inference_mode()
def test_sequences_that_are_not_equally_far_draft_together(drafter: MtpDrafter) -> None:
    together = drafter.propose([follow(drafter, sequence) for sequence in TEXTS])
    for sequence, draft in zip(TEXTS, together, strict=True):
        drafter.close(sequence)
        assert drafter.propose([follow(drafter, sequence)])[0].tokens == draft.tokens
        assert len(draft.tokens) == 2
    for sequence in TEXTS:
        drafter.close(sequence)
    drafter.pool.check([])


def test_only_plain_rounds_without_drafts_after_them_may_be_read_later() -> None:
    shapes = {(1, 0): True, (1, 2): False, (3, 0): False, (3, 2): False}  # width and drafts to make
    for (width, drafts), later in shapes.items():
        assert FollowShape(slots=2, width=width, drafts=drafts).only_follows is later
