"""Authentication: API keys, their tenants, and the most urgent band of each tenant."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from replicas.protocol import Band
from serve_app.errors import invalid_api_key, operator_key_required
from serve_app.keys.key_file import digest_of, read_owners
from serve_app.keys.rate_limits import NO_LIMITS, KeyLimits

_LOOK_PERIOD_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Principal:
    """Owner of a request."""

    tenant: str
    """Owner of the API key; scheduling is fair between tenants."""
    band_ceiling: Band
    """Most urgent band of the principal; requests for a more urgent band run in this one."""
    key_id: str | None = None
    """Digest of the API key; None: there is none."""
    limits: KeyLimits = NO_LIMITS
    """Limits of the API key."""
    is_operator: bool = False
    """True: the principal may see the metrics and the load of the whole server."""
    is_anonymous: bool = False
    """True: it stands for all clients, since there is no key file."""


ANONYMOUS = Principal(tenant="anonymous", band_ceiling=Band.INTERACTIVE, is_operator=True, is_anonymous=True)
"""Principal of every request if no key file is configured."""


class Authenticator:
    """Authenticator of API keys, which it knows by their SHA-256; without a key file every request is accepted.

    The key file, YAML or JSON, maps the hex digest of each key to its owner:

        5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8:
          tenant: acme
          ceiling: interactive      # or standard, the default, or batch
          operator: true            # optional: the key opens /metrics and /load, too
          requests_per_minute: 60   # this and the other `KeyLimits`: optional

    `created` and `note` are for people. A change of the file is noticed while the server runs.
    """

    def __init__(self, path: Path | None, monotonic: Callable[[], float]) -> None:
        """Load the keys in the file at `path`; None: no key is required.

        Raises:
            ValueError: the file does not have the form above; the message names the entry.
            OSError: it cannot be read.
        """
        self._path, self._monotonic = path, monotonic
        self._version = None if path is None else _version_of(path)
        self._principals = None if path is None else _principals_of(path)
        self._next_look_s = monotonic() + _LOOK_PERIOD_S
        # A reading goes on when its request is cancelled; the next one must wait for it.
        self._lock = threading.Lock()

    async def refresh(self) -> None:
        """Load the key file again if it has changed; looks at it once a second at most.

        A file that is gone or broken leaves the former keys in force, and an error in the log.
        """
        now_s = self._monotonic()
        if self._path is not None and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_PERIOD_S
            await asyncio.to_thread(self._load_if_changed, self._path)

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Return the principal of a request with these headers.

        Raises:
            HttpError: 401, no key is given or the key is unknown.
        """
        if self._principals is None:
            return ANONYMOUS
        digest = digest_of(_key_of(headers))
        owner: Principal | None = None
        for known, principal in self._principals.items():
            # Compare with every entry, so that the time taken reveals nothing about the keys.
            if hmac.compare_digest(known, digest):
                owner = principal
        if owner is None:
            raise invalid_api_key("the API key is not known")
        return owner

    def _load_if_changed(self, path: Path) -> None:
        with self._lock:
            version = _version_of(path)
            if version == self._version:
                return
            self._version = version
            try:
                self._principals = _principals_of(path)
            except (OSError, ValueError) as error:
                _log.error("the former API keys stay in force: %s", error)
            else:
                _log.info("the key file has changed: %d API keys", len(self._principals))


def _key_of(headers: Mapping[str, str]) -> str:
    """Return the API key: OpenAI's header's, or Anthropic's where the first is not there.

    Raises:
        HttpError: 401, there is none.
    """
    authorization = headers.get("authorization")
    if authorization is None and (key := headers.get("x-api-key", "").strip()):
        return key
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise invalid_api_key("an API key is required: send `Authorization: Bearer <key>` or `x-api-key: <key>`")
    return key.strip()


def require_operator(principal: Principal) -> None:
    """Refuse a principal that is not an operator.

    Raises:
        HttpError: 403.
    """
    if not principal.is_operator:
        raise operator_key_required()


def _principals_of(path: Path) -> dict[str, Principal]:
    return {
        digest: Principal(owner.tenant, owner.ceiling, digest, owner.limits, owner.is_operator)
        for digest, owner in read_owners(path).items()
    }


def _version_of(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change with the file; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
