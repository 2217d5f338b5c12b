"""What generated rows and rows of prompts share in recurrent layers: the convolution and the gates."""

import triton
import triton.language as tl


@triton.jit
def convolved(
    first,  # of x, at row 0
    past,  # of the slot's inputs: the WINDOW - 1 rows before `first` that are not in the pass
    weight,
    channel,  # [1, columns]
    inside,
    row,  # [rows, 1]
    mine,  # [rows, columns]
    oldest,  # the first row in the pass: 0, or less where rows of the same sequence stand before `first`
    stride,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu of the convolution of a block of channels, rounded as x is: [rows, columns], 0 outside `mine`.

    Element by element, so no row sees how many others there are.
    """
    total = tl.zeros(mine.shape, tl.float32)
    for tap in tl.static_range(WINDOW):
        source = row + (tap - (WINDOW - 1))
        old = tl.load(past + (row + tap) * COLUMNS + channel, mask=mine & (source < oldest), other=0.0)
        new = tl.load(first + source * stride + channel, mask=mine & (source >= oldest), other=0.0).to(tl.float32)
        factor = tl.load(weight + tap * COLUMNS + channel, mask=inside, other=0.0)
        total = tl.fma(tl.where(source < oldest, old, new), factor, total)
    return (total / (1.0 + tl.exp(-total))).to(first.dtype.element_ty).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + exp(x)). log(1 + y) = 2·artanh(y / (2 + y)): a GPU's logarithm is coarse near 1."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # at most 1/3
    t = s * s
    series = ((((((t * (1 / 15) + 1 / 13) * t + 1 / 11) * t + 1 / 9) * t + 1 / 7) * t + 1 / 5) * t + 1 / 3) * t + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
