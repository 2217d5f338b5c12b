"""Gemma 4 on a GPU: rows keep their bits in real shapes, past the window; tiny ones in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_engines import DEVICE, SLOW
from row_bits import check_row_bits
from tiny_gemma import FULL, SIZES, SLIDING, VARIANTS

from forerun.bench.random_model import SHAPES, RandomCheckpoint
from forerun.cache.pages import PagePool
from forerun.kernels.cuda import CudaKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.progress import NullProgress

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in exp")  # of a large logit it is infinite
# Layers of each kind, with keys of their own and of others: the shapes of all products, and the whole vocabulary.
SHARING = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
FEW = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
REAL = {
    "Gemma-4-E4B": SHAPES["Gemma-4-E4B"] | SHARING,
    "Gemma-4-12B": SHAPES["Gemma-4-12B"] | FEW,
    "Gemma-4-26B-A4B": SHAPES["Gemma-4-26B-A4B"] | FEW,
}
PAGE, WINDOW = 16, 20


def model_of(
    config: dict[str, Any], page: int, pages: int, context: int, dtype: torch.dtype
) -> tuple[Decoder, PagePool]:
    """Random weights, and a pool of so many pages in each group."""
    model = build(RandomCheckpoint(config, DEVICE), CudaKernels(DEVICE), DEVICE, dtype, NullProgress())
    model.rope.reserve(context)
    return model, PagePool.for_model(model.config, pages, page, dtype, DEVICE, on_device=True)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("name", list(REAL))
def test_rows_keep_their_bits_in_real_shapes(name: str) -> None:
    """One text grows over the window while it is gone on with, the other was longer before."""
    window = REAL[name]["sliding_window"]
    lengths = (window - 3, window + 300)
    pages = 66 * (-(-(lengths[1] + 8) // 64))
    model, pool = model_of(REAL[name], 64, pages, 2048, torch.bfloat16)
    check_row_bits(model, pool, lengths, (1, 7, 32, 64), (1, 5, 8))


@pytest.mark.kernels
@torch.inference_mode()
@pytest.mark.parametrize("variant", ["26B-A4B", pytest.param("E4B", marks=SLOW), pytest.param("12B", marks=SLOW)])
def test_rows_keep_their_bits_in_tiny_shapes(variant: str, fewer_programs: None) -> None:
    """The same in small: two lanes, a window of a page and a bit."""
    kind = "gemma4_unified_text" if variant == "12B" else "gemma4_text"
    config = SIZES | VARIANTS[variant] | (SHARING if variant == "E4B" else FEW)
    config |= {"model_type": kind, "sliding_window": WINDOW}
    model, pool = model_of(config, PAGE, 12, 64, torch.float32)
    check_row_bits(model, pool, (WINDOW - 2, 2 * PAGE - 1), (2,), (3,))
