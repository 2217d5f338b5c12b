"""Rows as a device completes them, and features that pass from row to row, against loops in Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from forerun.kernels.gpu.rows import BLOCK, COLUMNS, expand, features_before, keep_last

pytestmark = pytest.mark.kernels
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, DEPTH = 5, 3


def small(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("rows", [1, 17, BLOCK + 3])
def test_rows_are_completed(rows: int) -> None:
    """Ids as they are, pending tokens and drafts of the owner; positions as they are, or behind what is kept."""
    dice = random.Random(rows)
    token = [dice.choice([dice.randrange(50000), -1, -2 - dice.randrange(DEPTH)]) for _ in range(rows)]
    place = [dice.choice([dice.randrange(9000), -1 - dice.randrange(4)]) for _ in range(rows)]
    owner = [dice.randrange(SLOTS) for _ in range(rows)]
    pending = [dice.randrange(1 << 40) for _ in range(SLOTS)]
    position = [dice.randrange(9000) for _ in range(SLOTS)]
    drafts = [[dice.randrange(50000) for _ in range(SLOTS)] for _ in range(DEPTH)]
    tokens, at = expand(
        *map(small, (token, place, owner)),
        torch.tensor(pending, device=DEVICE),
        small(position),
        torch.tensor(drafts, device=DEVICE),
    )
    expected = []
    for code, stated, slot in zip(token, place, owner, strict=True):
        known = code if code >= 0 else pending[slot] if code == -1 else drafts[-2 - code][slot]
        expected.append((known, stated if stated >= 0 else position[slot] - 1 - stated))
    assert list(zip(tokens.tolist(), at.tolist(), strict=True)) == expected


@pytest.mark.parametrize("size", [24, COLUMNS + 8])
def test_features_of_the_position_before(size: int) -> None:
    """Of another row of the pass, or those that were kept of the owner; strides are those of wider tensors."""
    features = torch.randn(6, size + 8, device=DEVICE)[:, 8:]
    last = torch.randn(SLOTS, size, device=DEVICE)
    source, owner = [-1, 0, 1, -1, 3, -1], [2, 2, 2, 4, 4, 0]
    found = features_before(features, last, small(source), small(owner))
    expected = [features[one] if one >= 0 else last[slot] for one, slot in zip(source, owner, strict=True)]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("size", [24, COLUMNS + 8])
def test_features_of_the_last_kept_row(size: int) -> None:
    """Of a live slot that of its last accepted draft, of one that reads a prompt its tail; else what was kept."""
    features = torch.randn(9, size + 8, device=DEVICE)[:, 8:]
    last = torch.randn(SLOTS + 1, size, device=DEVICE)
    wanted = torch.tensor([[0, 1], [2, 3], [4, 4], [0, 0], [5, 6]], device=DEVICE)
    tail, live, accepted = [-1, -1, 4, 8, -1], [1, 1, 1, 0, 1], [1, 0, 0, 0, -1]
    expected = last.clone()
    for slot, row in enumerate((1, 2, 4, 8, None)):
        if row is not None:
            expected[slot] = features[row]
    keep_last(features, last, wanted, *map(small, (tail, live, accepted)))
    assert torch.equal(last, expected)
