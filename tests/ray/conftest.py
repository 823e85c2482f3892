"""Model of the tests that start Ray."""

from pathlib import Path

import pytest

from testkit.model.tiny_checkpoints import write_checkpoint

MODEL_NAME = "tiny-llama"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with a context that is long enough for streams of many seconds."""
    path = tmp_path_factory.mktemp("checkpoints") / MODEL_NAME
    path.mkdir()
    return write_checkpoint(path, max_position_embeddings=32768)
