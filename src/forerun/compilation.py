"""numba, with compiled code kept where a folder for it can be written; elsewhere it is compiled at every start."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(*signature: Any, **options: Any) -> Callable[[Function], Function]:
    """`numba.njit` with a cache if there can be one."""

    def compile_it(function: Function) -> Function:
        try:
            compiled: Function = njit(*signature, cache=True, **options)(function)
        except RuntimeError:  # numba found no folder
            compiled = njit(*signature, **options)(function)
        return compiled

    return compile_it
