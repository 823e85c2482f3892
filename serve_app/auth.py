"""Authentication: API keys, their tenants, and the most urgent band of each tenant."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from replicas.protocol import Band
from serve_app.errors import invalid_api_key


@dataclass(frozen=True, slots=True)
class Principal:
    """Owner of a request."""

    tenant: str
    """Owner of the API key; scheduling is fair between tenants."""
    band_ceiling: Band
    """Most urgent band of the principal; requests for a more urgent band run in this one."""


ANONYMOUS = Principal(tenant="anonymous", band_ceiling=Band.INTERACTIVE)
"""Principal of every request if no key file is configured."""


class Authenticator:
    """Authenticator of API keys, which it knows by their SHA-256; without a key file every request is accepted.

    The key file, YAML or JSON, maps the hex digest of each key to its owner:

        5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8:
          tenant: acme
          ceiling: interactive      # or standard, the default, or batch
    """

    def __init__(self, principals: Mapping[str, Principal] | None) -> None:
        self._principals = principals

    @classmethod
    def from_file(cls, path: str | None) -> Authenticator:
        """Load the keys in the file at `path`; None: no key is required.

        Raises:
            ValueError: the file does not have the form above; the message names the entry.
        """
        if path is None:
            return cls(None)
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"{path}: expected a mapping of SHA-256 digests of keys to their owners")
        return cls({str(digest): _principal(path, str(digest), owner) for digest, owner in entries.items()})

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Return the principal of a request with these headers.

        Raises:
            HttpError: 401, no key is given or the key is unknown.
        """
        if self._principals is None:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise invalid_api_key("an API key is required: send `Authorization: Bearer <key>`")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found: Principal | None = None
        for known, principal in self._principals.items():
            # Compare with every entry, so that the time taken reveals nothing about the keys.
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise invalid_api_key("the API key is not known")
        return found


def _principal(path: str, digest: str, owner: object) -> Principal:
    """Check one entry of a key file and return its principal."""
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{path}: `{digest[:8]}...` is not a SHA-256 digest in lower-case hex")
    tenant = owner.get("tenant") if isinstance(owner, dict) else None
    if not isinstance(owner, dict) or not isinstance(tenant, str) or not tenant:
        raise ValueError(f"{path}: the owner of `{digest[:8]}...` has no `tenant`")
    unknown = sorted(set(map(str, owner)) - {"tenant", "ceiling"})
    if unknown:
        raise ValueError(f"{path}: the owner of `{digest[:8]}...` has unknown fields {unknown}")
    ceiling = str(owner.get("ceiling", "standard")).upper()
    if ceiling not in Band.__members__:
        raise ValueError(f"{path}: `ceiling` of tenant `{tenant}` is `{owner['ceiling']}`; it must be a band")
    return Principal(tenant=tenant, band_ceiling=Band[ceiling])
