"""Downloads of the hub: they go on where they were cut, and every file has the hash that the hub names.

huggingface_hub lists the files and keeps the cache. It begins a file anew after a failed command, and does not check
hashes, so files are fetched here, into the places where it looks for them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from filelock import FileLock
from huggingface_hub import DryRunFileInfo, constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]
from rich.filesize import decimal

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import HUB_FILES, UNUSED_HUB_FILES
from serve_app.models.cache import nearest
from serve_app.models.progress import Transfers

_NUM_CONNECTIONS = 4
_HASH = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
_READ_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_PAUSE_S = 1.0
_MAX_FAILURES = 5
"""Transfers of a file that bring nothing, in a row."""
_FAILURES: tuple[type[Exception], ...] = (httpx.HTTPError, *HfHubHTTPError.__bases__)
"""Errors of the network: those of two HTTP libraries, of which the second depends on the hub's client, and OSError."""


class _Interrupted(Exception):
    """End of a transfer since the command ends."""


@dataclass(frozen=True, slots=True)
class _HubFile:
    """File of a model on the hub, and the place of its content in the cache."""

    name: str
    url: str
    num_bytes: int | None
    blob: Path
    """Its name is the file's hash: SHA-256, or git's SHA-1 of a small file."""


def download(hub_id: str, files: Sequence[str] = HUB_FILES, *, checks_all: bool = False) -> str:
    """Download the files of a model whose names have one of the patterns `files`, with progress on stderr.

    Return the directory. What is there already is not fetched again; with `checks_all` its hashes are checked, too.

    Raises:
        ModelLoadError: there is no such model, or it cannot be downloaded, or a file has another hash.
    """
    patterns: dict[str, Any] = {
        "allow_patterns": list(files),
        "ignore_patterns": UNUSED_HUB_FILES,
        "tqdm_class": _Silent,
    }
    try:
        try:
            listed = list(snapshot_download(hub_id, dry_run=True, **patterns))
        except DryRunError:
            listed = []  # The hub cannot be asked, so the model must be here.
        _fetch(hub_id, [info for info in listed if checks_all or info.will_download])
        return str(snapshot_download(hub_id, **patterns))
    except HFValidationError as error:
        raise ModelLoadError(f"{hub_id!r} is neither a directory nor a hub id: {error}{nearest(hub_id)}") from error
    except LocalEntryNotFoundError as error:
        reason = f"{hub_id!r} is no model here, and the hub cannot be reached"
        raise ModelLoadError(f"{reason}{nearest(hub_id)}") from error
    except RepositoryNotFoundError as error:
        reason = f"there is no model {hub_id!r} here or on the hub, or it needs a token (`hf auth login`)"
        raise ModelLoadError(f"{reason}{nearest(hub_id)}") from error
    except _FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{hub_id!r} cannot be downloaded: {reason}; what has come is kept for the next try"
        ) from error


def _fetch(hub_id: str, listed: list[DryRunFileInfo]) -> None:
    """Fetch the files that the cache lacks, and those whose content there is damaged."""
    if not listed:
        return
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model")
    is_over = threading.Event()
    with Transfers() as transfers, ThreadPoolExecutor(_NUM_CONNECTIONS) as executor:
        try:
            files = [*executor.map(lambda info: _hub_file(hub_id, folder, info), listed)]
            _check_space(folder, files)
            transfers.begin({file.name: file.num_bytes for file in files})
            for _ in executor.map(lambda file: _fetch_file(file, transfers, is_over), files):
                pass
        finally:
            is_over.set()


def _hub_file(hub_id: str, folder: Path, info: DryRunFileInfo) -> _HubFile:
    url = hf_hub_url(hub_id, info.filename, revision=info.commit_hash)
    pointer = Path(info.local_path)
    name = pointer.resolve().name if pointer.exists() else get_hf_file_metadata(url).etag
    if name is None or _HASH.fullmatch(name) is None:
        raise ModelLoadError(f"the hub names no hash of {info.filename}")
    return _HubFile(info.filename, url, info.file_size, folder / "blobs" / name)


def _check_space(folder: Path, files: list[_HubFile]) -> None:
    missing = [file for file in files if not file.blob.exists()]
    num_bytes = sum(file.num_bytes or 0 for file in missing)
    num_bytes -= sum(_partial(file).stat().st_size for file in missing if _partial(file).exists())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        remedy = "make room, or name another folder in HF_HUB_CACHE"
        raise ModelLoadError(
            f"the model needs {decimal(num_bytes)}, and {folder.parent} has {decimal(free)} free; {remedy}"
        )


def _fetch_file(file: _HubFile, transfers: Transfers, is_over: threading.Event) -> None:
    """Fetch a file if its content is not there whole; go on with a part of it."""
    folder, partial = file.blob.parent, _partial(file)
    locks = folder.parents[1] / ".locks" / folder.parent.name
    for path in (folder, locks):
        path.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{file.blob.name}.lock"):  # which huggingface_hub takes, too
        if file.blob.exists():
            if _hash_of(file.blob) == file.blob.name:
                transfers.end(file.name, "here, its hash agrees")
                return
            file.blob.unlink()
        with partial.open("ab") as target:
            if file.num_bytes is not None and target.tell() > file.num_bytes:
                target.truncate(0)
            _transfer(file, target, transfers, is_over)
        digest = _hash_of(partial)
        if digest != file.blob.name:
            partial.unlink()
            raise ModelLoadError(
                f"{file.name} has the hash {digest}, and the hub names {file.blob.name}; fetch it again"
            )
        partial.rename(file.blob)
    transfers.end(file.name, "fetched, its hash agrees")


def _transfer(file: _HubFile, target: BinaryIO, transfers: Transfers, is_over: threading.Event) -> None:
    """Append to `target` what it lacks of a file; try again unless nothing has come several times."""
    num_failures = 0
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
        while (start := target.tell()) != file.num_bytes:
            headers = {**build_hf_headers(), "accept-encoding": "identity", "range": f"bytes={start}-"}
            try:
                with client.stream("GET", file.url, headers=headers) as response:
                    response.raise_for_status()
                    if response.status_code != httpx.codes.PARTIAL_CONTENT:  # the whole file comes
                        target.truncate(0)
                    for part in response.iter_bytes():
                        if is_over.is_set():
                            raise _Interrupted
                        target.write(part)
                        transfers.show(file.name, target.tell())
                if file.num_bytes is None:
                    return
            except httpx.TransportError:
                num_failures = num_failures + 1 if target.tell() <= start else 0
                if num_failures == _MAX_FAILURES or is_over.wait(_PAUSE_S):
                    raise


def _partial(file: _HubFile) -> Path:
    return file.blob.with_name(f"{file.blob.name}.incomplete")


def _hash_of(path: Path) -> str:
    """Return the hash of a file in the form of its blob's name: SHA-256, or of 40 digits git's SHA-1."""
    is_git = len(path.name.partition(".")[0]) == 40
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False) if is_git else hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


class _Silent(tqdm):
    """Progress of huggingface_hub's own, which is not shown: the files are there when it looks for them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]
