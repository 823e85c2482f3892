"""Checks of a configuration on one machine, for the processes that may start there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from replicas.errors import ModelLoadError
from replicas.model.hardware.limits import unshared_bytes
from replicas.model.loading.checks import check_config
from replicas.text.tokenizer_files import SMALL_HUB_FILES, load_tokenizer
from serve_app.config import HeadwayConfig
from serve_app.keys.key_file import read_owners
from serve_app.models.local_models import local_directory
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.tokenize.prompt_encoder import PromptEncoder
from serve_app.preflight.checkpoint import check_checkpoint

_SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the check of one field."""

    field: str
    fault: str | None
    """Reason why the configuration cannot be served; None: there is none."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Processes of the application that may start on one machine."""

    num_model_replicas: int
    has_ingress: bool = True
    has_jobs: bool = True
    stopped_pids: tuple[int, ...] = ()
    """Processes of replicas that end before the new ones start."""


def machine_findings(config: HeadwayConfig, placement: Placement) -> Iterator[Finding]:
    """Yield what the fields that name files of this machine lead to. No process is started, and nothing is written."""
    yield _finding("model", lambda: _check_model(config, placement))
    key_file = config.ingress_settings().api_key_file
    if placement.has_ingress and key_file is not None:
        yield _finding("api_key_file", lambda: check_keys(Path(key_file)))
    if placement.has_jobs:
        for field, folder in _folders(config):
            yield _finding(field, lambda folder=folder: _check_folder(folder))  # type: ignore[misc]


def _finding(field: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except (ModelLoadError, ValueError) as error:
        return Finding(field, " ".join(str(error).split()))
    return Finding(field, None)


def check_keys(path: Path) -> None:
    """Check that a key file can be read.

    Raises:
        ValueError: it cannot, or has another form; the message names the path.
    """
    try:
        read_owners(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _check_model(config: HeadwayConfig, placement: Placement) -> None:
    """Check the model as far as the processes that may start here read it.

    Of a hub model only the small files are fetched: a replica fetches the weights when it starts.
    """
    directory = local_directory(config.model_path)
    if directory is None:
        from serve_app.models.hub import download  # only here, since its import takes a while

        directory = Path(download(config.model_path, SMALL_HUB_FILES))
        check_config(directory)
    elif placement.num_model_replicas > 0:
        freed_bytes = sum(map(_own_bytes, placement.stopped_pids))
        check_checkpoint(directory, config, placement.num_model_replicas, freed_bytes)
    if placement.has_ingress or placement.has_jobs:
        check_text(str(directory), config)


def check_text(model: str, config: HeadwayConfig) -> None:
    """Load what an ingress loads: the tokenizer, the chat template and the sampling defaults.

    Raises:
        ModelLoadError: they cannot be used.
    """
    settings = config.ingress_settings()
    try:
        tokenizer = load_tokenizer(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of model {model!r}: {error}") from error
    try:
        PromptEncoder(tokenizer, model, settings.tool_call_parser, settings.chat_template)
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(error)) from error
    SamplingDefaults.load(model, settings.limits.generation_config)


def _own_bytes(pid: int) -> int:
    """Return the memory of a process without mapped files, bytes; 0: it has ended, or the system does not tell."""
    with contextlib.suppress(psutil.Error):
        return unshared_bytes(psutil.Process(pid)) or 0
    return 0


def _folders(config: HeadwayConfig) -> Iterator[tuple[str, Path]]:
    """Yield the local folders that a jobs worker writes to, each with its field."""
    yield "data_dir", Path(config.data_dir)
    if config.database_url is not None and config.database_url.startswith(_SQLITE):
        yield "database_url", Path(config.database_url.removeprefix(_SQLITE)).parent
    if config.files_url is not None and "://" not in config.files_url:
        yield "files_url", Path(config.files_url)


def _check_folder(folder: Path) -> None:
    """Check that a folder can be written, or made in the nearest one that exists.

    Raises:
        ValueError: it cannot; the message names the path at fault.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{nearest} cannot be written")
