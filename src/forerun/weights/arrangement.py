"""How a tensor of a file becomes the tensor of the same name in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows, then columns are put in order; then values change; the shape comes last."""

    shape: tuple[int, ...]  # in Hugging Face's file
    rows: Order | None = None  # row i is the stored row rows[i]
    columns: Order | None = None
    change: Callable[[Tensor], Tensor] | None = None  # of decoded values: norms and the like
