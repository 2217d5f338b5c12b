"""Triton's interpreter, mended for the tests: it keeps bits on every CPU, takes newer numpys, and less time."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np


def mend_the_interpreter() -> None:
    """Needs Triton; every kernel of this process runs in the interpreter."""
    from triton import language
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """With BLAS the bits of a row depend on the rows beside it on many CPUs; here every row is summed in order."""
        left, right = (np.ascontiguousarray(x.data, dtype=d.data.dtype) for x in (a, b))
        products = left[:, :, None] * right  # [rows, inner, columns]
        return interpreter.TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)

    make_dtype, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:
        """What it says itself, but looked up only once for each type."""
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = make_dtype(kind)
        return dtypes[name]

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return language.tuple([language.constexpr(n) for n in shape]), language.constexpr(int(np.prod(shape)))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        """What it does itself, but the shape as Triton's tuple is made once for each shape."""
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(tuple(type.shape) if type.is_block() else ())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._get_np_dtype = numpy_dtype
    language.tensor.__init__ = init_tensor
    # Every sum of indices is computed twice to see whether it overflows; in these tiny models none does.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # It gives the language its interpreted form anew in every call of every function. Once is enough.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # Its numbers are arrays of one element, which numpy from 2.4 on does not take for the bound of a loop.
    language.tensor.__index__ = lambda self: int(self.handle.data.item())
