"""Models on this machine: the directory of the default model, of a GGUF file, or of a checkpoint that lies here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from replicas.errors import ModelLoadError
from serve_app.models.default_model import DEFAULT_MODEL_NAME, default_model
from serve_app.models.gguf import CHECKPOINT_FORM, MODELS_DIRECTORY, convert_once


def local_checkpoint(model: str, cache: Path = MODELS_DIRECTORY) -> str:
    """Return the directory of the default model, of a model in the cache by its name, or of a converted GGUF file.

    Return any other model unchanged. The first call fetches the default model or converts the file, which takes a
    while. Concurrent calls on one machine wait for it.

    Raises:
        ModelLoadError: the default model cannot be fetched; or the file is missing or cannot be converted.
    """
    if model == DEFAULT_MODEL_NAME:
        return str(default_model(cache))
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        cached = cache.expanduser() / model
        is_name = path.name == model and not model.startswith(".") and not path.exists()
        return str(cached) if is_name and cached.is_dir() else model
    if not path.is_file():
        raise ModelLoadError(f"there is no file {path}")
    path = path.resolve()
    stat = path.stat()
    identity = f"{path} {stat.st_size} {stat.st_mtime_ns} {CHECKPOINT_FORM}"
    key = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    return str(convert_once(path, cache.expanduser() / f"{path.stem}-{key}"))


def local_directory(model: str) -> Path | None:
    """Return the directory of a model on this machine; None: `model` is a hub id. See `local_checkpoint`.

    Raises:
        ModelLoadError: there is no such directory or file, or it cannot be fetched or converted.
    """
    directory = Path(local_checkpoint(model)).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_file():
        raise ModelLoadError(f"{model} is a file and no checkpoint; name a directory, a .gguf file or a hub id")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"there is no directory {model}")
    return None
