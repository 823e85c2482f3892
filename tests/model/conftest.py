"""Tests of the model share their machine: one thread (barriers cost more than such models), and no progress bars."""

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

from testkit.model.compiled_kernels import need_kernels, with_threads


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_small() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compile the kernels; skip the test where they cannot be compiled."""
    need_kernels()


@pytest.fixture(scope="module", params=[1, 3])
def kernels_in_threads(kernels: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the compiled kernels in one thread and in three."""
    with with_threads(request.param):
        yield
