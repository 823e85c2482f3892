"""Signatures of webhooks, as Standard Webhooks wants them."""

from __future__ import annotations

import base64
import binascii
import secrets
from datetime import UTC, datetime

from standardwebhooks import Webhook

_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24


def new_secret() -> str:
    """A secret that nobody knows yet."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


class WebhookSigner:
    """Signs with one secret, which receivers know too."""

    def __init__(self, secret: str) -> None:
        """`secret`: `whsec_` and base64 of at least 24 bytes; other forms mean different keys to different receivers.

        Raises:
            ValueError: it is of another form; the message does not repeat it.
        """
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not secret.startswith(_PREFIX) or len(key) < _MIN_SECRET_BYTES:
            raise ValueError(f"a webhook secret is {_PREFIX} and base64 of at least {_MIN_SECRET_BYTES} bytes")
        self._webhook = Webhook(key)

    def headers(self, message_id: str, body: str, now_unix_s: float) -> dict[str, str]:
        """The headers that prove that `body` is ours, and sent now."""
        moment = datetime.fromtimestamp(int(now_unix_s), UTC)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now_unix_s)),
            "webhook-signature": self._webhook.sign(message_id, moment, body),
        }
