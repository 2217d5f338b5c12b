"""numba, with compiled code kept where a folder for it can be written; elsewhere it is compiled at every start."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from numba import njit

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def jit(*signature: Any, **options: Any) -> Callable[[AnyFunction], AnyFunction]:
    """`numba.njit` with a cache if there can be one."""

    def compile_it(function: AnyFunction) -> AnyFunction:
        try:
            compiled: Any = njit(*signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # numba found no folder, or no room in it
            compiled = njit(*signature, **options)(function)
        else:
            _let_it_fail(getattr(compiled, "_cache", None))  # NUMBA_DISABLE_JIT leaves the function as it is
        kept: AnyFunction = compiled
        return kept

    return compile_it


def _let_it_fail(cache: Any) -> None:
    """A full disk is no reason not to run what has been compiled."""
    save = getattr(cache, "save_overload", None)
    if save is None:
        return

    def save_if_possible(*compiled: Any) -> None:
        with suppress(OSError):
            save(*compiled)

    cache.save_overload = save_if_possible
