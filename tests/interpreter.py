"""Triton's interpreter, mended for the tests: it keeps bits on every CPU, takes newer numpys, and less time."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np


def mend_the_interpreter() -> None:
    """Needs Triton; every kernel of this process runs in the interpreter."""
    from triton import language
    from triton.runtime import interpreter

    def numbers(x: Any) -> Any:
        if x.dtype.scalar == language.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """With BLAS the bits of a row depend on the rows beside it on many CPUs; here every row is summed in order.

        It also takes bfloat16, which numpy lacks, as the numbers that its 16 bits stand for.
        """
        left, right = (np.ascontiguousarray(numbers(x), dtype=d.data.dtype) for x in (a, b))
        products = left[:, :, None] * right  # [rows, inner, columns]
        return interpreter.TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)

    # Most of its time goes into descriptions of types and shapes. Each is made once, by its own code, and kept.
    make_dtype, make_block, dtypes = interpreter._get_np_dtype, language.block_type.__init__, {}

    def numpy_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = make_dtype(kind)
        return dtypes[name]

    @functools.cache
    def block_sizes(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        block = object.__new__(language.block_type)
        make_block(block, language.float32, list(shape))
        return block.shape, block.numel, str(block.shape)

    def init_block(self: Any, element: Any, shape: Any) -> None:
        self.element_ty = element
        self.shape, self.numel, text = block_sizes(tuple(getattr(n, "value", n) for n in shape))
        self.name = f"<{text}, {element}>"

    @functools.cache
    def tensor_sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return language.tuple([language.constexpr(n) for n in shape]), language.constexpr(math.prod(shape))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_sizes(tuple(type.shape) if type.is_block() else ())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._get_np_dtype = numpy_dtype
    language.tensor.__init__ = init_tensor
    language.block_type.__init__ = init_block
    # Every sum of indices is computed twice to see whether it overflows; in these tiny models none does.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # It gives the language its interpreted form anew in every call of every function. Once is enough.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # Its numbers are arrays of one element, which numpy from 2.4 on does not take for the bound of a loop.
    language.tensor.__index__ = lambda self: int(self.handle.data.item())
