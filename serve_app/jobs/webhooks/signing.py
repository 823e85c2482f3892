"""Signatures of webhooks, by the Standard Webhooks specification."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
import secrets
import uuid
from datetime import UTC, datetime
from pathlib import Path

from standardwebhooks import Webhook

from serve_app.jobs.files.store import sync_directory, sync_file

_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24


def new_secret() -> str:
    """Return a new random secret."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def load_or_create_secret(path: Path) -> str:
    """Return the secret in a file; create the file with a new secret and mode 0600 if it is missing.

    If several processes create it at the same time, all use the secret of the first.
    """
    if not path.exists():
        own = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_secret() + "\n")
            sync_file(file)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # unlike a rename, a link never replaces an existing file
        own.unlink()
        sync_directory(path.parent)
    return path.read_text().strip()


def content_key(secret: str) -> bytes:
    """Return the key of encrypted contents that follows from a webhook secret: 64 bytes."""
    return hmac.digest(secret.encode(), b"headway encrypted contents", "sha512")


class WebhookSigner:
    """Signer with one secret that receivers share (HMAC)."""

    def __init__(self, secret: str) -> None:
        """`secret`: `whsec_` and base64 of at least 24 bytes. Receivers would read other forms as different keys.

        Raises:
            ValueError: the secret has another form; the message does not contain it.
        """
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not secret.startswith(_PREFIX) or len(key) < _MIN_SECRET_BYTES:
            raise ValueError(f"a webhook secret is {_PREFIX} and base64 of at least {_MIN_SECRET_BYTES} bytes")
        self._webhook = Webhook(key)

    def headers(self, message_id: str, body: str, now_unix_s: float) -> dict[str, str]:
        """Return headers that sign the message's id, the current time and `body`."""
        moment = datetime.fromtimestamp(int(now_unix_s), UTC)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now_unix_s)),
            "webhook-signature": self._webhook.sign(message_id, moment, body),
        }
