"""Triton's kernels on CPU tensors, in Triton's interpreter.

Triton reads TRITON_INTERPRET when kernels are defined, once for the whole process. `make test` sets it; else run
`TRITON_INTERPRET=1 python -m pytest tests/model/interpreted`.
"""

import os

import pytest


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 is not set in this process")
