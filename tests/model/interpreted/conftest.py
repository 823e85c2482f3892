"""Triton's kernels on CPU tensors, in Triton's interpreter.

Triton reads TRITON_INTERPRET when kernels are defined, once for the whole process. `make test` sets it; else run
`TRITON_INTERPRET=1 python -m pytest tests/model/interpreted`.
"""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 is not set in this process")


@pytest.fixture
def bfloat16(_interpreter: None) -> Iterator[None]:
    """Let the interpreter compute in bfloat16, whose bits it would take for integers."""
    from testkit.model.bfloat16_interpreter import bfloat16_arithmetic  # It needs Triton.

    with bfloat16_arithmetic():
        yield
