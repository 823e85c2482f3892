"""Check of a checkpoint by transformers: `python -m replicas.model.loading.check_model DIRECTORY`.

The program fails, and its last line says why, if the model cannot be served. Otherwise it prints its own memory without
mapped files, in bytes, after it has loaded a replica's libraries and the tokenizer; nothing where the system does not
tell. It reads no values of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from replicas.errors import ModelLoadError
from replicas.model.loading.config import read_config
from replicas.model.loading.weights import check_shapes


def check_model(directory: Path) -> None:
    """Check that transformers knows the model, and that the checkpoint has all its weights in their shapes.

    Raises:
        ModelLoadError: it does not, or has not.
    """
    check_shapes(directory, read_config(str(directory.resolve())))


if __name__ == "__main__":
    try:
        check_model(Path(sys.argv[1]))
        from replicas.model.loading.loader import tokenizer_of  # Only here: a refusal needs no more libraries.

        tokenizer = tokenizer_of(sys.argv[1])
        memory = psutil.Process().memory_info()
        print(memory.rss - memory.shared if hasattr(memory, "shared") else "")
    except ModelLoadError as error:
        sys.exit(str(error))
