"""GGUF files as checkpoints: each file is converted once, into this machine's cache."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from replicas.errors import ModelLoadError
from serve_app.models.torch_process import run_module

MODELS_DIRECTORY = Path("~/.cache/headway/models")
_CONVERT_LIMIT_S = 1800.0
CHECKPOINT_FORM = "4 or 8 bits, IQ4 in 4"
"""Form of converted checkpoints. Those of earlier forms are not used."""
_log = logging.getLogger(__name__)


def convert_once(file: Path, directory: Path, *, keeps_bits: bool = True) -> Path:
    """Convert `file` to `directory` unless that exists; return `directory`. A directory appears whole or not at all.

    With `keeps_bits`, quantized linear layers keep their bits; else all weights become bfloat16.

    Raises:
        ModelLoadError: the file cannot be converted.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{directory}.lock", timeout=_CONVERT_LIMIT_S):
            if not directory.is_dir():
                _log.info("converting a GGUF file", extra={"file": str(file), "directory": str(directory)})
                _convert(file, directory, [] if keeps_bits else ["--dense"])
    except Timeout:
        raise ModelLoadError(f"another process has been converting {file} for {_CONVERT_LIMIT_S:.0f} s") from None
    return directory


def _convert(file: Path, directory: Path, options: list[str]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        run_module(f"the conversion of {file.name}", "replicas.model.loading.gguf", str(file), str(temporary), *options)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot convert {file}: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
