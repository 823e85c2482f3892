"""Model of the tests that start Ray."""

from pathlib import Path

import pytest

from testkit.model.pooling_checkpoints import PoolingFiles
from testkit.model.tiny_checkpoints import tiny_config, write_checkpoint

MODEL_NAME = "tiny-llama"
POOLING = PoolingFiles("mean")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama that embeds, too, with a context that is long enough for streams of many seconds."""
    path = tmp_path_factory.mktemp("checkpoints") / MODEL_NAME
    path.mkdir()
    POOLING.write(path, tiny_config("llama").hidden_size)
    return write_checkpoint(path, max_position_embeddings=32768)
