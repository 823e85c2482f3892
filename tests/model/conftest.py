"""Tests of the model share their machine: one thread (barriers cost more than such models), and no progress bars."""

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_small() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
