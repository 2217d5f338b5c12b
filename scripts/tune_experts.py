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
NAMES = ("OUTPUTS_IN", "STEP_IN", "WARPS_IN", "OUTPUTS_OUT", "STEP_OUT", "WARPS_OUT")
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
        now = settings()
        found = [(timed(x, chosen, weights, stacks), now)]
        for setting in product((1, 2, 4), (512, 1024), (2, 4), (1, 2), (256, 512), (4, 8)):
            use(setting)
            found.append((timed(x, chosen, weights, stacks), setting))
        use(now)
        for microseconds, setting in [*sorted(found)[:6], found[0]]:
            note = " as it is" if setting == now else ""
            print(f"  {microseconds:7.1f} us a layer: {dict(zip(NAMES, setting, strict=True))}{note}", flush=True)


def timed(x: Tensor, chosen: list[Tensor], weights: Tensor, stacks: list[list[Tensor]]) -> float:
    """Microseconds of a layer."""
    return 1e6 * device_seconds(captured(partial(all_layers, x, chosen, weights, stacks))) / LAYERS


def settings() -> tuple[int, ...]:
    """Sizes that the kernels use now."""
    return tuple(getattr(module, name) for name in NAMES)


def use(setting: tuple[int, ...]) -> None:
    """Let the kernels use other sizes."""
    for name, value in zip(NAMES, setting, strict=True):
        setattr(module, name, value)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else GEMMA_26B))
