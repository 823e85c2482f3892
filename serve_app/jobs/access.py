"""Access of an ingress's endpoints to files, batches and jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_app.jobs.api.errors import UnknownBatch, UnknownFile, UnknownJob, UnknownResponse
from serve_app.jobs.api.records import BatchKind, BatchRecord, JobsClient, JobsService, JobsSettings
from serve_app.jobs.files.store import FileStore
from serve_app.jobs.webhooks.guard import WebhookGuard

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Form of every id. Other text is rejected before it reaches the database, which may not accept it."""
_MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class JobsAccess:
    """Services and limits that the endpoints of files, batches and jobs use."""

    client: JobsClient
    files: FileStore
    callbacks: WebhookGuard
    settings: JobsSettings

    async def find(self, kind: BatchKind, tenant: str, batch_id: str) -> BatchRecord:
        """Return a tenant's batch of one kind in its current state.

        Raises:
            UnknownBatch: there is no such batch.
            UnknownJob: `kind` is JOB and there is no such job.
        """
        if not _ID.fullmatch(batch_id):
            raise _unknown(kind, batch_id)
        try:
            batch = await self.client.call(JobsService.batch, tenant, batch_id)
        except UnknownBatch:
            raise _unknown(kind, batch_id) from None
        if batch.kind is not kind:
            raise _unknown(kind, batch_id)
        return batch


def checked_file_id(text: str) -> str:
    """Return `text` if it has the form of a file id.

    Raises:
        UnknownFile: it has another form.
    """
    if not _ID.fullmatch(text):
        raise UnknownFile(f"there is no file `{text[:_MAX_SHOWN_CHARS]}`")
    return text


def stored_id_of(text: str) -> str:
    """Return `text` if it has the form of the id of a stored response, conversation or item.

    Raises:
        UnknownResponse: it has another form.
    """
    if not _ID.fullmatch(text):
        raise UnknownResponse(f"there is nothing stored under `{text[:_MAX_SHOWN_CHARS]}`")
    return text


def _unknown(kind: BatchKind, batch_id: str) -> UnknownBatch:
    if kind is BatchKind.JOB:
        return UnknownJob(f"there is no job `{batch_id[:_MAX_SHOWN_CHARS]}`")
    return UnknownBatch(f"there is no batch `{batch_id[:_MAX_SHOWN_CHARS]}`")
