"""Files that other processes read at any time: they find the old content or the new one, whole."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file under a name of its own, and rename it. Of several writers the last one wins."""
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        new.write_text(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
