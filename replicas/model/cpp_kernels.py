"""Having the compiled kernels: for float32 and bfloat16 on CPU."""

from __future__ import annotations

import logging

import torch

from replicas.model.kernel_build import KernelBuildError, built_library

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16)


def load_kernels(directory: str | None, dtype: torch.dtype) -> bool:
    """Make the kernels callable, compiling them into `directory` if need be; whether they now are, for `dtype`.

    Without a directory none are compiled.
    """
    if directory is None or dtype not in _DTYPES:
        return False
    try:
        torch.ops.load_library(built_library(directory))  # type: ignore[no-untyped-call]
    except (KernelBuildError, OSError) as error:
        _log.warning("serving without compiled CPU kernels, which is slower: %s", error)
        return False
    return True
