"""Access of an ingress to asynchronous work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_app.jobs.errors import UnknownBatch, UnknownFile, UnknownJob
from serve_app.jobs.file_store import FileStore
from serve_app.jobs.records import BatchKind, BatchRecord, JobsService
from serve_app.jobs.settings import JobsSettings
from serve_app.jobs.webhook_guard import WebhookGuard

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""No other text is anything's id; a database may not even take it."""
_MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class JobsAccess:
    """Services and limits that the endpoints of files, batches and jobs use."""

    service: JobsService
    files: FileStore
    callbacks: WebhookGuard
    settings: JobsSettings

    async def find(self, kind: BatchKind, tenant: str, batch_id: str) -> BatchRecord:
        """A tenant's batch of a kind, as it is now.

        Raises:
            UnknownBatch: there is none; of a job UnknownJob.
        """
        if not _ID.fullmatch(batch_id):
            raise _unknown(kind, batch_id)
        try:
            batch = await self.service.batch(tenant, batch_id)
        except UnknownBatch:
            raise _unknown(kind, batch_id) from None
        if batch.kind is not kind:
            raise _unknown(kind, batch_id)
        return batch


def checked_file_id(text: str) -> str:
    """What may be a file's id.

    Raises:
        UnknownFile: it cannot be one.
    """
    if not _ID.fullmatch(text):
        raise UnknownFile(f"there is no file `{text[:_MAX_SHOWN_CHARS]}`")
    return text


def _unknown(kind: BatchKind, batch_id: str) -> UnknownBatch:
    if kind is BatchKind.JOB:
        return UnknownJob(f"there is no job `{batch_id[:_MAX_SHOWN_CHARS]}`")
    return UnknownBatch(f"there is no batch `{batch_id[:_MAX_SHOWN_CHARS]}`")
