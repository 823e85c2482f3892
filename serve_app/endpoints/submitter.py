"""Sender of a request for asynchronous work, with the request's headers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from replicas.errors import InvalidRequest
from serve_app.auth import Authenticator, Principal
from serve_app.http.exchange import exchange_of
from serve_app.openai.request.priority import ClientHints, hints_from

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Submitter:
    """Sender of a request for asynchronous work, and the headers that apply to the work."""

    principal: Principal
    hints: ClientHints
    request_id: str
    idempotency_key: str | None
    path: str

    @classmethod
    def of(cls, request: Request, authenticator: Authenticator) -> Submitter:
        """Return the sender of `request`.

        Raises:
            HttpError: 401, the API key is missing or unknown.
            InvalidRequest: a header has an invalid value.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            message = (
                f"header `idempotency-key` has {len(key)} characters; it must be 1 to 255 printable ones, no spaces"
            )
            raise InvalidRequest(message, "idempotency-key")
        return cls(
            principal=authenticator.authenticate(request.headers),
            hints=hints_from(request.headers),
            request_id=exchange_of(request).request_id,
            idempotency_key=key,
            path=request.url.path,
        )

    def digest(self, fields: Mapping[str, object]) -> str | None:
        """Return a digest of path and body, to recognize a retry under one idempotency key; None: there is no key."""
        if self.idempotency_key is None:
            return None
        canonical = json.dumps([self.path, fields], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
