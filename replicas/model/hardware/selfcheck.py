"""Self-checks: comparison of fast code with plain torch, before the fast code is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
TOLERANCES = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error of one operation, by dtype: above rounding errors, and far below a wrong result's, about 1."""
WHOLE_MODEL = 2.0
"""Factor of the tolerances for a whole model, because rounding errors add up over layers."""

Agree = Callable[[bool], bool]
"""Agreement of the ranks of a model: True if the verdict of each is. They call it in the same order."""


def alone(verdict: bool) -> bool:
    """Return the verdict of the only rank. See `Agree`."""
    return verdict


def agreed_fault(fault: str | None, agree: Agree) -> str | None:
    """Return the fault, or a sentence about that of another rank; None: the candidate works on all ranks."""
    return None if agree(fault is None) else fault or "it does not work on another rank"


def kernels_work(
    device: torch.device, check: Callable[[], str | None], consequence: str, agree: Agree = alone
) -> bool:  # fmt: skip
    """Return True if kernels work on `device`, a GPU with Triton, and on all ranks that `agree`; else warn of why.

    `check` imports them and returns their fault. Only torch for CUDA installs Triton. `consequence` is what is slow
    without them.
    """
    if device.type != "cuda":
        return False
    try:
        fault = check()
    except ImportError as error:
        fault = str(error)
    fault = agreed_fault(fault, agree)
    if fault is not None:
        _log.warning("%s: Triton's kernels do not work here: %s", consequence, fault)
    return fault is None


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row [..., size]: the norm of its difference over the norm of the expected row.

    The error is infinite if shape or dtype differ, and NaN if some number is NaN.
    """
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return float("inf")
    if output.numel() == 0:
        return 0.0
    output, expected = output.float(), expected.float()
    return float(((output - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def find_fault(errors: Iterable[tuple[str, float]], dtype: torch.dtype, scale: float = 1.0) -> str | None:
    """Return a description of the first fault of a candidate; None if there is none.

    Args:
        errors: names of operations and their relative errors. Each iteration runs the candidate. Any exception is a
            fault, because compilers, drivers and devices raise exceptions of many classes.
        dtype: dtype of the candidate.
        scale: factor of the tolerance.
    """
    try:
        for name, error in errors:
            if not error <= scale * TOLERANCES[dtype]:  # True for NaN, too.
                return f"{name} in {dtype} differs from plain torch by {error:.1e}, relative to each output"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
