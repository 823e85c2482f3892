"""Ids: a word for the kind, then a random number."""

from __future__ import annotations

import uuid

from serve_app.jobs.records import BatchKind


def new_id(kind: str) -> str:
    """An id that nobody else has or can guess."""
    return f"{kind}-{uuid.uuid4().hex}" if kind == "file" else f"{kind}_{uuid.uuid4().hex}"


def new_batch_id(kind: BatchKind) -> str:
    """An id for a batch or job."""
    return new_id("job" if kind is BatchKind.JOB else "batch")
