"""The secret that webhooks are signed with, where the operator has chosen none."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from serve_app.jobs.durable_disk import sync_directory
from serve_app.jobs.webhook_signing import new_secret


def kept_secret(path: Path) -> str:
    """The secret in a file that only we can read; drawn and written at the first time.

    Of several processes that find none together, all use the one that one of them has written.
    """
    if not path.exists():
        own = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # unlike a rename it replaces nothing
        own.unlink()
        sync_directory(path.parent)
    return path.read_text().strip()
