"""The compiled kernels for tests: kept where replicas keep them, so that a machine compiles them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from replicas.model.kernel_build import KernelBuildError, built_library
from replicas.model.options import DEFAULT_KERNEL_CACHE_DIR


def need_kernels() -> None:
    """Make the kernels callable, or skip the test and say why."""
    try:
        torch.ops.load_library(built_library(DEFAULT_KERNEL_CACHE_DIR))
    except KernelBuildError as error:
        pytest.skip(f"the CPU kernels cannot be compiled here: {error}")


@contextmanager
def with_threads(num_threads: int) -> Iterator[None]:
    """Have torch and the kernels compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
