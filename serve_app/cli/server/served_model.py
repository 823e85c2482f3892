"""The model of `headway serve`: fetched, converted and checked before Ray starts."""

from __future__ import annotations

import sys
from pathlib import Path

from replicas.errors import ModelLoadError
from serve_app.config import HeadwayConfig
from serve_app.models.default_model import DEFAULT_MODEL_NAME, DefaultModelUnavailable, default_model
from serve_app.models.gguf import local_checkpoint
from serve_app.models.progress import working
from serve_app.preflight.checkpoint import check_checkpoint, local_directory


def prepare_model(config: HeadwayConfig) -> HeadwayConfig:
    """Return the configuration with a model on this machine that can be served, so far as its files tell.

    Where `config` does not set a model, that is the default model, or else the bundled demo model.

    Raises:
        ModelLoadError: the model cannot be had, or cannot be served.
    """
    if "model" in config.model_fields_set:
        try:
            model = None if config.model is None else _directory_of(config.model)
        except DefaultModelUnavailable as error:
            raise ModelLoadError(f"{DEFAULT_MODEL_NAME} cannot be fetched: {error}") from error
    else:
        model = _default_directory()
    if model is None:
        return config
    check_checkpoint(Path(model), config, config.num_replicas)
    names = config.served_model_name or (config.model_name if config.model else DEFAULT_MODEL_NAME)
    return config.model_copy(update={"model": model, "served_model_name": names})


def _default_directory() -> str | None:
    """Return the default model's directory; None, with a line that says why, if it cannot be had."""
    try:
        return str(default_model())
    except DefaultModelUnavailable as error:
        reason = f"{DEFAULT_MODEL_NAME} cannot be fetched ({error})"
        print(f"{reason}; the bundled demo model, which is a toy, takes its place.", file=sys.stderr, flush=True)
        return None


def _directory_of(model: str) -> str:
    """Return the directory of a model: a GGUF file is converted and a hub id downloaded, once each."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():
            print(f"Reading {path.name}, which is converted to safetensors once ...", file=sys.stderr, flush=True)
        with working("Converting ..."):
            return local_checkpoint(model)
    directory = local_directory(model)
    if directory is not None:
        return str(directory)
    if model == DEFAULT_MODEL_NAME:
        return str(default_model())
    from serve_app.models.cache import download  # only here, since its import takes a while

    return download(model)
