"""Encrypted contents of items: texts that clients keep for this server, and can neither read nor change."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

KEY_BYTES = 64
"""Size of a key of AES-256-SIV."""
_VERSION = b"\x01"
"""First byte of what is encrypted."""


@dataclass(frozen=True, slots=True)
class ContentCipher:
    """Authenticated encryption of one tenant's texts: AES-SIV of RFC 5297, with the tenant and a kind bound in.

    It is deterministic, so that a response has the same bytes each time that it is made of what is stored.
    """

    key: bytes = field(repr=False)
    tenant: str

    def encrypt(self, kind: str, text: str) -> str:
        """Return a text of a kind, encrypted, as base64."""
        encrypted = AESSIV(self.key).encrypt(_VERSION + text.encode(), self._bound(kind))
        return base64.urlsafe_b64encode(encrypted).decode()

    def decrypt(self, kind: str, content: str) -> str:
        """Return the text in what `encrypt` returned for the same kind, tenant and key.

        Raises:
            ValueError: it is another's, or was altered.
        """
        try:
            encrypted = base64.b64decode(content.encode("ascii"), altchars=b"-_", validate=True)
            text = AESSIV(self.key).decrypt(encrypted, self._bound(kind))
        except (InvalidTag, UnicodeEncodeError, binascii.Error):
            raise ValueError("the content was not written here for this tenant, or was altered") from None
        return text.removeprefix(_VERSION).decode()

    def _bound(self, kind: str) -> list[bytes]:
        return [kind.encode(), self.tenant.encode()]
