"""Compiled CPU kernels for tests, in the replicas' cache, so that a machine compiles them once."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from replicas.model.hardware.kernel_build import KernelBuildError, built_library, compile_with_torch, found_compiler
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR


def need_kernels() -> None:
    """Load the kernels, or skip the test with the reason."""
    try:
        torch.ops.load_library(built_library(DEFAULT_KERNEL_CACHE_DIR))
    except KernelBuildError as error:
        pytest.skip(f"the CPU kernels cannot be compiled here: {error}")


def built_program(source: Path, flags: Sequence[str]) -> Path:
    """Return a program that includes the kernels' headers, compiled once per version of headers, source and flags."""
    need_kernels()
    library = built_library(DEFAULT_KERNEL_CACHE_DIR)  # its name changes with the headers, torch and the processor
    version = hashlib.sha256(repr((library.name, flags)).encode() + source.read_bytes()).hexdigest()[:24]
    program = library.with_name(f"{source.stem}-{version}")
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled = Path(folder) / program.name
            compile_with_torch(found_compiler(), source, compiled, flags)
            compiled.rename(program)
    return program


@contextmanager
def with_threads(num_threads: int) -> Iterator[None]:
    """Set the number of threads of torch and the kernels within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
