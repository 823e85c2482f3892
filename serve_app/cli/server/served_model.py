"""The model of `headway serve`, and the kernels that compute it on a CPU: there before Ray starts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from replicas.model.hardware.kernel_build import KernelBuildError, built_library, can_compile
from serve_app.cli.server.start_report import Steps
from serve_app.config import HeadwayConfig
from serve_app.models.default_model import DefaultModelUnavailable
from serve_app.models.local_models import local_checkpoint, local_directory
from serve_app.preflight.checkpoint import check_checkpoint, may_use_gpu


def prepare_model(config: HeadwayConfig) -> HeadwayConfig:
    """Return the configuration with a model on this machine that can be served, so far as its files tell.

    Where `config` does not set a model and the default one cannot be fetched, that is the bundled demo model, and a
    line says so.

    Raises:
        ModelLoadError: the model cannot be had, or cannot be served.
    """
    if config.model is None:
        _print(f"{config.model_name} is a toy for tests; serve another model to use its answers.")
        return config
    try:
        model = directory_of(config.model)
    except DefaultModelUnavailable as error:
        if "model" in config.model_fields_set:
            raise
        _print(f"{error}; the bundled demo model takes its place.")
        return prepare_model(config.model_copy(update={"model": None}))
    check_checkpoint(Path(model), config, config.num_replicas)
    names = config.served_model_name or config.model_name
    return config.model_copy(update={"model": model, "served_model_name": names})


def directory_of(model: str, *, checks_all: bool = False) -> str:
    """Return the directory of a model: a GGUF file is converted and a hub id downloaded, once each.

    With `checks_all` the hashes of files that were downloaded before are checked, too.

    Raises:
        ModelLoadError: it cannot be had.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():
            _print(f"Reading {path.name}, which is converted to safetensors once ...")
        return local_checkpoint(model)
    directory = local_directory(model)
    if directory is not None:
        return str(directory)
    from serve_app.models.hub import download  # only here, since its import takes a while

    return download(model, checks_all=checks_all)


@contextlib.contextmanager
def kernels_compiled(config: HeadwayConfig) -> Iterator[None]:
    """Compile the CPU kernels beside the block if they are needed and not there; wait for them at its end.

    Ray's processes compute even while they wait: on a slow machine a compilation beside them takes twice as long. After
    a failure the replica tries again, and says what it is without them.
    """
    options = config.replica_options().model
    directory = options.kernel_cache_dir
    if directory is None or may_use_gpu(config) or not can_compile(directory, options.dtype):
        yield
        return
    compilation = threading.Thread(target=_compile, args=(directory,), name="compilation", daemon=True)
    compilation.start()
    yield
    if compilation.is_alive():
        with contextlib.closing(Steps(sys.stderr)) as steps:
            steps.begin("Compiling kernels for this processor, once ...")
            compilation.join()


def _compile(directory: str) -> None:
    with contextlib.suppress(KernelBuildError):
        built_library(directory)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
