"""Ids: a word that says of what, and chance."""

from __future__ import annotations

import uuid


def new_id(kind: str) -> str:
    """An id that nobody else has or can guess."""
    return f"{kind}-{uuid.uuid4().hex}" if kind == "file" else f"{kind}_{uuid.uuid4().hex}"
