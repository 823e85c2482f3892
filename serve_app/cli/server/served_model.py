"""The model of `headway serve`: fetched, converted and checked before Ray starts."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from replicas.errors import ModelLoadError
from replicas.model.hardware.limits import available_memory_bytes
from replicas.model.loading.checks import check_config, shapes_digest
from replicas.model.loading.memory import check_memory, replica_memory
from serve_app.config import HeadwayConfig
from serve_app.models.default_model import DEFAULT_MODEL_NAME, DefaultModelUnavailable, default_model
from serve_app.models.gguf import local_checkpoint
from serve_app.models.progress import working
from serve_app.models.torch_process import run_module
from serve_app.models.whole_files import write_whole

_CHECK_CPU_LIMIT_S = 120.0
"""Most processor time of the check by transformers, seconds. It takes 5 to 30, by the number of layers."""
_CHECKS = Path("~/.cache/headway/checked-models")
"""Folder with a file for each model that can be served. It holds the memory of the checking process, bytes.

It is named by a hash of the config, the weights' shapes and transformers' version.
"""


def prepare_model(config: HeadwayConfig) -> HeadwayConfig:
    """Return the configuration with a model on this machine that can be served, so far as its files tell.

    Where `config` does not set a model, that is the default model, or else the bundled demo model.

    Raises:
        ModelLoadError: the model cannot be had, or cannot be served.
    """
    if "model" in config.model_fields_set:
        model = None if config.model is None else _directory_of(config.model)
    else:
        model = _default_directory()
    if model is None:
        return config
    _check(model, config)
    names = config.served_model_name or (config.model_name if config.model else DEFAULT_MODEL_NAME)
    return config.model_copy(update={"model": model, "served_model_name": names})


def _default_directory() -> str | None:
    """Return the default model's directory; None, with a line that says why, if it cannot be had."""
    try:
        return str(default_model())
    except DefaultModelUnavailable as error:
        reason = f"{DEFAULT_MODEL_NAME} cannot be had ({error})"
        print(f"{reason}. Serving the bundled demo model instead.", file=sys.stderr, flush=True)
        return None


def _directory_of(model: str) -> str:
    """Return the directory of a model: a GGUF file is converted and a hub id downloaded, once each."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():
            print(f"Reading {path.name}, which is converted to safetensors once ...", file=sys.stderr, flush=True)
        with working("Converting ..."):
            return local_checkpoint(model)
    if path.is_dir():
        return str(path)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"there is no directory {model}")
    from serve_app.models.cache import download  # only here, since its import takes a while

    return download(model)


def _check(directory: str, config: HeadwayConfig) -> None:
    """Check a checkpoint by its files, then by transformers in a process of its own: this one must not import torch.

    What that process takes is known only then, so memory is checked twice. The first check needs no second.
    """
    check_config(Path(directory))
    options = config.replica_options()
    needed = replica_memory(Path(directory), options.model, options.runner, options.limits)
    has_gpu = options.model.device != "cpu" and bool(config.num_gpus_per_replica or shutil.which("nvidia-smi"))
    if not has_gpu:
        check_memory(needed, Path(directory), available_memory_bytes(), config.num_replicas)
    process_bytes = _check_architecture(directory)
    if not has_gpu and process_bytes is not None:
        measured = needed.with_process(process_bytes)
        check_memory(measured, Path(directory), available_memory_bytes(), config.num_replicas)


def _check_architecture(directory: str) -> int | None:
    """Have transformers build the model without values in a process of its own, which takes seconds: once for each.

    Return the memory of that process, bytes; None: not known.
    """
    digest = hashlib.sha256((version("transformers") + shapes_digest(Path(directory))).encode()).hexdigest()
    passed = _CHECKS.expanduser() / digest[:24]
    if passed.exists():
        return _number(passed.read_text())
    with working("Checking the model ..."):
        measured = run_module(
            "the check of the model", "replicas.model.loading.check_model", directory, cpu_limit_s=_CHECK_CPU_LIMIT_S
        )
    with contextlib.suppress(OSError):  # the next start then checks again
        passed.parent.mkdir(parents=True, exist_ok=True)
        write_whole(passed, measured)
    return _number(measured)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
