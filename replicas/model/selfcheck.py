"""Checks of fast code against plain torch, made before it is used."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error of one operation by dtype: above rounding, and far below the error of wrong code, about 1."""
WHOLE_MODEL = 2.0
"""Tolerances of a whole model, in those of one operation: rounding adds up over layers."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row [..., size]: the norm of its difference, relative to its expected norm.

    Infinite where shape or dtype differ, NaN where some number is none.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def find_fault(errors: Iterable[tuple[str, float]], dtype: torch.dtype, scale: float = 1.0) -> str | None:
    """Return what is wrong with a candidate, in words; None: nothing.

    Args:
        errors: the relative error of each operation, by name. It runs the candidate when it is asked for the next.
            Whatever it raises is a fault: compilers, drivers and devices raise anything, and plain torch needs none.
        dtype: the candidate's.
        scale: of the tolerance.
    """
    try:
        for name, error in errors:
            if not error <= scale * TOLERANCES[dtype]:  # Also if it is no number.
                return f"{name} in {dtype} differs from plain torch by {error:.1e}, relative to each output"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
