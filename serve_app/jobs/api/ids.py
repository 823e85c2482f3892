"""Ids of files, batches, jobs, owners and events: a word for the kind, then a random number."""

from __future__ import annotations

import uuid

from serve_app.jobs.api.records import BatchKind


def new_id(kind: str) -> str:
    """Return a unique id that cannot be guessed (UUID 4)."""
    return f"{kind}-{uuid.uuid4().hex}" if kind == "file" else f"{kind}_{uuid.uuid4().hex}"


def new_batch_id(kind: BatchKind) -> str:
    """Return an id for a new batch or job."""
    return new_id("job" if kind is BatchKind.JOB else "batch")
