"""Events that webhooks deliver: OpenAI's batch events and, for jobs, its response events."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import httpx

from serve_app.jobs.api.records import BatchKind, BatchRecord, BatchStatus, JsonObject
from serve_app.tracing.context import TraceContext

_JOB_ENDINGS = {
    BatchStatus.COMPLETED: "completed",
    BatchStatus.FAILED: "failed",
    BatchStatus.EXPIRED: "incomplete",
    BatchStatus.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Webhook delivery, enqueued in the transaction that ended its batch and due until it is delivered or dead."""

    id: str
    """Event id, the same at every attempt: receivers use it to drop duplicates."""
    batch_id: str
    tenant: str
    event: str
    """`batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`; for a job `response.completed`,
    `response.failed`, `response.incomplete` or `response.cancelled`."""
    url: str
    body: str
    """JSON text; exactly these bytes are signed."""
    num_attempts: int
    created_unix_s: float
    trace: TraceContext | None = None
    """Span that asked for the batch."""


def event_id_of(batch: BatchRecord) -> str:
    """Return the id of the event for the end of a batch.

    It follows from the batch and its end. A batch that ends again, after a backup of the database was restored, has
    the same one, and the receiver drops the second webhook.
    """
    return f"evt_{hashlib.blake2b(f'{batch.id} {batch.status.value}'.encode(), digest_size=16).hexdigest()}"


def delivery_of(batch: BatchRecord, url: str, event_id: str, now: float) -> Delivery:
    """Build the delivery of the event for the end of a batch.

    A job is a batch of one request, so its event is a response event, with the outcome of that request.
    """
    ended_unix_s = batch.ended_unix_s
    assert ended_unix_s is not None
    event_type = f"batch.{batch.status.value}" if batch.kind is not BatchKind.JOB else f"response.{_job_ending(batch)}"
    data: JsonObject = {"id": batch.id}
    if batch.request_id is not None:
        data["request_id"] = batch.request_id
    body: JsonObject = {
        "id": event_id,
        "object": "event",
        "created_at": int(ended_unix_s),
        "type": event_type,
        "data": data,
    }
    return Delivery(event_id, batch.id, batch.tenant, event_type, url, json.dumps(body, separators=(",", ":")), 0, now)


def host_of(url: str) -> str:
    """Return the host of a delivery's URL, in lower case; empty if the URL is invalid.

    The host is in its encoded form: `URL.host` would decode it, and raises if an international name is malformed.
    """
    try:
        return httpx.URL(url).raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        return ""


def _job_ending(batch: BatchRecord) -> str:
    has_failed = batch.status is BatchStatus.COMPLETED and batch.counts.failed > 0
    return "failed" if has_failed else _JOB_ENDINGS[batch.status]
