"""GGUF files as checkpoints: each file is converted once, into this machine's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from replicas.errors import ModelLoadError

MODELS_DIRECTORY = Path("~/.cache/headway/models")
_CONVERT_LIMIT_S = 1800.0
_log = logging.getLogger(__name__)


def local_checkpoint(model: str, cache: Path = MODELS_DIRECTORY) -> str:
    """Return the directory of the converted checkpoint if `model` is a GGUF file; return any other model unchanged.

    The first call for a file converts it, which takes a while. Concurrent calls on one machine wait for it.

    Raises:
        ModelLoadError: the file cannot be converted.
    """
    path = Path(model).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        return model
    path = path.resolve()
    stat = path.stat()
    key = hashlib.blake2b(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    return str(convert_once(path, cache.expanduser() / f"{path.stem}-{key}"))


def convert_once(file: Path, directory: Path) -> Path:
    """Convert `file` to `directory` unless that exists; return `directory`. A directory appears whole or not at all.

    Raises:
        ModelLoadError: the file cannot be converted.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{directory}.lock", timeout=_CONVERT_LIMIT_S):
            if not directory.is_dir():
                _log.info("converting a GGUF file", extra={"file": str(file), "directory": str(directory)})
                _convert(file, directory)
    except Timeout:
        raise ModelLoadError(f"another process has been converting {file} for {_CONVERT_LIMIT_S:.0f} s") from None
    return directory


def _convert(file: Path, directory: Path) -> None:
    """Convert in a process of its own, since this one must not import torch."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    command = [sys.executable, "-m", "replicas.model.loading.gguf", str(file), str(temporary)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_CONVERT_LIMIT_S)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]
        raise ModelLoadError(f"cannot convert {file}: {reason}") from None
    except subprocess.TimeoutExpired:
        raise ModelLoadError(f"the conversion of {file} took more than {_CONVERT_LIMIT_S:.0f} s") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
