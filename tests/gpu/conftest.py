"""Checks that run on the CPU as well keep to one thread, as the tests of the model do."""

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_small() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
