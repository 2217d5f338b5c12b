"""A kernel starts while the one before it still runs, and waits inside for what that one writes.

Between two launches a GPU's memory is idle for a microsecond or two, and a pass has hundreds of them. A kernel launched
with `launch_pdl=overlaps(device)` calls `wait_for_previous` in every program, and before that reads only what the
kernel just before it does not write: weights, the state of its own layer. The next kernel is let in by those that have
waited, so nobody is ever more than one kernel early.
"""

from functools import cache

import torch
import triton
import triton.language as tl  # noqa: F401 - the interpreter wants to see it
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@cache
def overlaps(device: torch.device) -> bool:
    """Is it a GPU that can?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous():
    """What the kernels before this one have written is there from here on."""
    if cuda_capability_geq(9, 0):
        gdc_wait()


@triton.jit
def let_next_in():
    """The next kernel may start when all programs of this one have come here, or ended."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def after_previous():
    """Both at once, for kernels that leave room on the GPU."""
    wait_for_previous()
    let_next_in()
