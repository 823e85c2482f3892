"""Cache of models: converted ones in Headway's directory, downloaded ones in the hub's cache."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import CachedRepoInfo, CacheNotFound, HFCacheInfo, scan_cache_dir

from serve_app.models.default_model import DEFAULT_MODEL_NAME
from serve_app.models.gguf import MODELS_DIRECTORY

_LOCK_LIMIT_S = 10.0
_SIMILAR = 0.3
"""Least similarity of names, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """Model in a cache of this machine."""

    name: str
    kind: str
    """default, converted (from a GGUF file) or hub."""
    num_bytes: int
    used_unix_s: float
    """Last read of one of its files, unix seconds, as exact as the file system records it."""
    remove: Callable[[], None]
    """Removes it from the disk."""


def nearest(name: str) -> str:
    """Return the end of a sentence that names the three models of this machine whose names are most similar."""
    names = [*(model.name for model in cached_models()), DEFAULT_MODEL_NAME]
    similar = difflib.get_close_matches(name, dict.fromkeys(names), n=3, cutoff=_SIMILAR)
    return f"; did you mean {', '.join(similar)}?" if similar else "; `headway models list` shows those here"


def cached_models(directory: Path = MODELS_DIRECTORY, hub_directory: Path | None = None) -> list[CachedModel]:
    """Return the models in both caches by name; `hub_directory` None: where the environment says."""
    models = [*_converted_models(directory.expanduser()), *_hub_models(hub_directory)]
    return sorted(models, key=lambda model: model.name.lower())


def _converted_models(directory: Path) -> list[CachedModel]:
    if not directory.is_dir():
        return []
    return [_converted(path) for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _converted(path: Path) -> CachedModel:
    files = [file.stat() for file in path.rglob("*") if file.is_file()]

    def remove() -> None:
        with FileLock(f"{path}.lock", timeout=_LOCK_LIMIT_S):  # The lock of conversions.
            shutil.rmtree(path)

    return CachedModel(
        name=path.name,
        kind="default" if path.name == DEFAULT_MODEL_NAME else "converted",
        num_bytes=sum(file.st_size for file in files),
        used_unix_s=max((file.st_atime for file in files), default=path.stat().st_atime),
        remove=remove,
    )


def _hub_models(directory: Path | None) -> list[CachedModel]:
    try:
        cache = scan_cache_dir(directory)
    except CacheNotFound:
        return []
    return [_hub_model(cache, repository) for repository in cache.repos if repository.repo_type == "model"]


def _hub_model(cache: HFCacheInfo, repository: CachedRepoInfo) -> CachedModel:
    revisions = [revision.commit_hash for revision in repository.revisions]
    return CachedModel(
        name=repository.repo_id,
        kind="hub",
        num_bytes=repository.size_on_disk,
        used_unix_s=repository.last_accessed,
        remove=lambda: cache.delete_revisions(*revisions).execute(),
    )
