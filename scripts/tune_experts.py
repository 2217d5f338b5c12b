"""How long the experts of a layer take on a GPU by the size of their tiles: what the constants of the kernels rest on.

    PYTHONPATH=src python scripts/tune_experts.py [hidden inner experts top]

For few rows and for many, beside the time that reading the chosen experts takes at the speed of a plain copy. All of
these tiles give a row the same bits.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import triton
from torch import Tensor

from forerun.bench.timing import captured, device_seconds
from forerun.kernels.gpu import experts as module
from forerun.kernels.gpu.experts import Cut

GEMMA_26B = (2816, 704, 128, 8)
LAYERS = 6  # different ones in turn: together they do not fit into a cache
NARROW = [Cut(outputs, inputs, 4, stages) for outputs in (16, 32, 64) for inputs in (64, 128) for stages in (4, 6)]
WIDE = [Cut(64, 64, 4, 4), Cut(64, 64, 8, 4), Cut(128, 64, 4, 4), Cut(128, 64, 8, 3), Cut(128, 64, 8, 4)]
CUTS = {1: NARROW, 16: NARROW, 32: [*NARROW, *WIDE], 64: WIDE, 128: WIDE}  # by rows of a tile


def all_layers(x: Tensor, chosen: list[Tensor], weights: Tensor, stacks: list[list[Tensor]]) -> None:
    """One after another."""
    for ids, (gate_up, down) in zip(chosen, stacks, strict=True):
        module.experts(x, ids, weights, gate_up, down, "gelu_tanh")


def main(hidden: int, inner: int, count: int, top: int) -> None:
    """Print a table for every number of rows: what the kernels use now, and the fastest."""
    torch.manual_seed(0)
    stacks = [
        [
            torch.randn(count, *shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
            for shape in ((2 * inner, hidden), (hidden, inner))
        ]
        for _ in range(LAYERS)
    ]
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    speed = 2 * source.numel() / device_seconds(partial(torch.empty_like(source).copy_, source))  # bytes each way
    for rows in (1, 8, 64, 512, 2048):
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        chosen = [torch.rand(rows, count, device="cuda").topk(top).indices.sort().values for _ in stacks]
        weights = torch.full((rows, top), 1 / top, device="cuda")
        read = sum(len(ids.unique()) for ids in chosen) / LAYERS * 3 * hidden * inner * 2
        print(f"{rows} rows: {1e6 * read / speed:.1f} us at the speed of a copy ({speed / 1e12:.2f} TB/s)", flush=True)
        tile = module.row_tile(rows, top, count, x)
        print(f"  {timed(x, chosen, weights, stacks):7.1f} us a layer as it is: tiles of {tile} rows", flush=True)
        kept, sizes = module.TILES, [1] if rows == 1 else [size for size, _ in module.TILES]
        for size in sizes:
            if rows > 1:
                module.TILES = ((size, float("inf")),)
            for name, cuts in (("in", module.ENTERING), ("out", module.LEAVING)):
                found = sorted((timed_with(cuts, size, cut, x, chosen, weights, stacks), cut) for cut in CUTS[size])
                for microseconds, cut in found[:2]:
                    print(f"  {microseconds:7.1f} us with tiles of {size} rows, {name}: {cut}", flush=True)
        module.TILES = kept


def timed_with(
    cuts: dict[int, Cut],
    tile: int,
    cut: Cut,
    x: Tensor,
    chosen: list[Tensor],
    weights: Tensor,
    stacks: list[list[Tensor]],
) -> float:
    """Microseconds of a layer with another cut for tiles of so many rows; no end of them where it does not fit."""
    kept, cuts[tile] = cuts[tile], cut
    try:
        return timed(x, chosen, weights, stacks)
    except triton.OutOfResources:
        return float("inf")
    finally:
        cuts[tile] = kept


def timed(x: Tensor, chosen: list[Tensor], weights: Tensor, stacks: list[list[Tensor]]) -> float:
    """Microseconds of a layer."""
    return 1e6 * device_seconds(captured(partial(all_layers, x, chosen, weights, stacks))) / LAYERS


if __name__ == "__main__":
    with torch.inference_mode():
        main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else GEMMA_26B))
