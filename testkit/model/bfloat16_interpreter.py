"""Numbers in bfloat16 in Triton's interpreter, which stores their bits as integers and would compute with those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_ARITHMETIC = ("create_fadd", "create_fsub", "create_fmul")
_CASTS = ("create_fp_trunc", "create_fp_ext", "create_fp_to_fp", "create_si_to_fp", "create_ui_to_fp")


@contextmanager
def bfloat16_arithmetic() -> Iterator[None]:
    """Compute sums and products of bfloat16 in float32, and round each result once, to nearest even, as a GPU does.

    Dot products are summed in float64: NumPy's own sums may depend on a row's place in its tile.
    """
    changes: dict[str, Callable[..., Any]] = {
        **{name: _arithmetic(getattr(InterpreterBuilder, name)) for name in _ARITHMETIC},
        **{name: _cast(getattr(InterpreterBuilder, name)) for name in _CASTS},
        "create_dot": _dot,
        "get_bf16": _constant,
    }
    with ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(patch.object(InterpreterBuilder, name, change, create=True))
        yield


def _constant(_: Any, value: float) -> Any:
    return _rounded(TensorHandle(np.array([value], dtype=np.float32), tl.float32))


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(handle: Any) -> Any:
    bits = np.ascontiguousarray(handle.data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(np.where(np.isnan(handle.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def _arithmetic(operation: Callable[..., Any]) -> Callable[..., Any]:
    def compute(builder: Any, one: Any, other: Any) -> Any:
        result = operation(builder, _widened(one), _widened(other))
        return _rounded(result) if one.dtype.scalar == tl.bfloat16 else result

    return compute


def _cast(operation: Callable[..., Any]) -> Callable[..., Any]:
    def cast(builder: Any, handle: Any, dtype: Any, *arguments: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 and dtype.scalar == tl.bfloat16:
            return _rounded(TensorHandle(handle.data.astype(np.float32), tl.float32))
        if handle.dtype.scalar == tl.bfloat16:
            handle = _widened(handle)
            if dtype.scalar == tl.float32:
                return handle
        return operation(builder, handle, dtype, *arguments)

    return cast


def _dot(_builder: Any, one: Any, other: Any, sums: Any, *_: Any) -> Any:
    product = np.matmul(_widened(one).data.astype(np.float64), _widened(other).data.astype(np.float64))
    return TensorHandle(product.astype(sums.data.dtype) + sums.data, sums.dtype.scalar)
