"""Key file: the owner of each API key, under the key's SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from filelock import FileLock

from replicas.protocol import Band
from serve_app.keys.rate_limits import KEY_LIMIT_NAMES, NO_LIMITS, KeyLimits

LOCK_LIMIT_S = 10.0
"""Longest wait for another process that changes the file, seconds."""
_FIELDS = {"tenant", "ceiling", "operator", "created", "note"} | KEY_LIMIT_NAMES
_HEADER = "# API keys of Headway by their SHA-256. `headway keys` writes this file; comments are not kept, `note` is.\n"


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Owner of an API key."""

    tenant: str
    ceiling: Band = Band.STANDARD
    """Most urgent band that the key may use."""
    is_operator: bool = False
    """True: the key also opens the routes for operators, /metrics and /load."""
    created: str | None = None
    """Date of the key in UTC."""
    note: str | None = None
    limits: KeyLimits = NO_LIMITS


def new_key() -> str:
    """Return a new API key with 256 random bits."""
    return f"hw-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in hex, under which the file lists it."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_owners(path: Path) -> dict[str, KeyOwner]:
    """Read the owners in the file at `path`, YAML or JSON, by digest.

    Raises:
        ValueError: the file has another form; the message names the entry.
        OSError: it cannot be read.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: expected a mapping of SHA-256 digests of keys to their owners")
    return {str(digest): _owner(path, str(digest), owner) for digest, owner in entries.items()}


@contextlib.contextmanager
def changed_owners(path: Path) -> Iterator[dict[str, KeyOwner]]:
    """Give the owners in a file for a change, and write them back atomically; a new file is for its owner only.

    A file lock keeps other processes out until the context ends. An exception leaves the file as it was.

    Raises:
        ValueError, OSError: the file cannot be read or written, or is locked for too long (`filelock.Timeout`).
    """
    path = path.expanduser().resolve()
    if not path.parent.is_dir():  # The lock would make it.
        raise FileNotFoundError(f"there is no folder {path.parent}")
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_LIMIT_S, mode=0o600):
        owners = read_owners(path) if path.exists() else {}
        yield owners
        _replace(path, _text(path, owners))


def _replace(path: Path, text: str) -> None:
    """Write a file under another name and rename it; it keeps the owner and the mode of the file that it replaces."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                former = path.stat()
                os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))
                os.fchown(file.fileno(), former.st_uid, former.st_gid)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _text(path: Path, owners: Mapping[str, KeyOwner]) -> str:
    entries = {digest: _entry(owner) for digest, owner in owners.items()}
    if path.suffix == ".json":
        return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    return _HEADER + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)


def _entry(owner: KeyOwner) -> dict[str, str | int]:
    fields: dict[str, str | int | None] = {
        "tenant": owner.tenant,
        "ceiling": owner.ceiling.name.lower(),
        "operator": owner.is_operator or None,
        "created": owner.created,
        "note": owner.note,
        **asdict(owner.limits),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _owner(path: Path, digest: str, fields: object) -> KeyOwner:
    """Check one entry of a key file and return its owner."""
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{path}: `{digest[:8]}...` is not a SHA-256 digest in lower-case hex")
    tenant = fields.get("tenant") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(tenant, str) or not tenant:
        raise ValueError(f"{path}: the owner of `{digest[:8]}...` has no `tenant`")
    unknown = sorted(set(map(str, fields)) - _FIELDS)
    if unknown:
        raise ValueError(f"{path}: the owner of `{digest[:8]}...` has unknown fields {unknown}")
    ceiling = str(fields.get("ceiling", "standard")).upper()
    if ceiling not in Band.__members__:
        raise ValueError(f"{path}: `ceiling` of tenant `{tenant}` is `{fields['ceiling']}`; it must be a band")
    is_operator = fields.get("operator", False)
    if not isinstance(is_operator, bool):
        raise ValueError(f"{path}: `operator` of tenant `{tenant}` is `{is_operator}`; it must be true or false")
    created, note = (None if fields.get(name) is None else str(fields[name]) for name in ("created", "note"))
    try:
        limits = KeyLimits.of(fields)
    except ValueError as error:
        raise ValueError(f"{path}: tenant `{tenant}`: {error}") from None
    return KeyOwner(tenant, Band[ceiling], is_operator, created, note, limits)
