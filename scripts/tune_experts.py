"""How long the experts of a layer take on a GPU by the size of their tiles: what the constants of the kernels rest on.

    PYTHONPATH=src python scripts/tune_experts.py [hidden inner experts top]

For one row and for eight, beside the time that reading the chosen experts takes at the speed of a plain copy. Tiles
decide the order of sums, so whatever is chosen must depend on the shape of a model alone.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product

import torch
from torch import Tensor

from forerun.bench.timing import captured, device_seconds
from forerun.kernels.gpu import experts as module

GEMMA_26B = (2816, 704, 128, 8)
LAYERS = 8  # different ones in turn: together they do not fit into a cache


def all_layers(x: Tensor, chosen: list[Tensor], weights: Tensor, stacks: list[list[Tensor]]) -> None:
    """One after another."""
    for ids, (gate_up, down) in zip(chosen, stacks, strict=True):
        module.experts(x, ids, weights, gate_up, down, "gelu_tanh")


def main(hidden: int, inner: int, count: int, top: int) -> None:
    """Print a table, the fastest first."""
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
    for rows in (1, 8):
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        chosen = [torch.rand(rows, count, device="cuda").topk(top).indices.sort().values for _ in stacks]
        weights = torch.full((rows, top), 1 / top, device="cuda")
        read = sum(len(ids.unique()) for ids in chosen) / LAYERS * 3 * hidden * inner * 2
        print(f"{rows} rows: {1e6 * read / speed:.1f} us at the speed of a copy ({speed / 1e12:.2f} TB/s)", flush=True)
        found = []
        for outputs, step_in, step_out in product((2, 4, 8), (512, 1024), (256, 512, 1024)):
            module.OUTPUTS, module.STEP_IN, module.STEP_OUT = outputs, step_in, step_out
            seconds = device_seconds(captured(partial(all_layers, x, chosen, weights, stacks)))
            found.append((1e6 * seconds / LAYERS, outputs, step_in, step_out))
        for microseconds, *sizes in sorted(found)[:6]:
            print("  {:7.1f} us a layer: OUTPUTS {}, STEP_IN {}, STEP_OUT {}".format(microseconds, *sizes), flush=True)
        now = next(each for each in found if each[1:] == (4, 1024, 512))
        print(f"  {now[0]:7.1f} us a layer as it is (4, 1024, 512)", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else GEMMA_26B))
