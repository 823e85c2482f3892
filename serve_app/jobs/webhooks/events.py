"""Events that webhooks deliver: OpenAI's events of batches and, for jobs, of responses."""

from __future__ import annotations

import json
from dataclasses import dataclass

import httpx

from serve_app.jobs.api.records import BatchKind, BatchRecord, BatchStatus, JsonObject

_JOB_ENDINGS = {
    BatchStatus.COMPLETED: "completed",
    BatchStatus.FAILED: "failed",
    BatchStatus.EXPIRED: "incomplete",
    BatchStatus.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """An event that is to be told."""

    type: str
    body: str
    """JSON; byte for byte what is signed."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A webhook that is owed: noted in the transaction that ended its batch, kept until it is delivered or dead."""

    id: str
    """The same at every attempt, so that a receiver can drop what it has seen."""
    batch_id: str
    event: str
    """`batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`; of a job `response.` and so on."""
    url: str
    body: str
    """JSON; byte for byte what is signed."""
    num_attempts: int
    created_unix_s: float


def event_of(batch: BatchRecord, event_id: str) -> WebhookEvent:
    """The event that a batch has ended; `event_id` is its delivery's id too.

    A job is a batch of one request and is told of as a response: it failed where its request did.
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
    return WebhookEvent(event_type, json.dumps(body, separators=(",", ":")))


def host_of(url: str) -> str:
    """The host that a delivery's URL is for, in lower case; empty where it is no URL.

    As it goes over the wire: `URL.host` decodes it, and raises where an international name is malformed.
    """
    try:
        return httpx.URL(url).raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        return ""


def _job_ending(batch: BatchRecord) -> str:
    has_failed = batch.status is BatchStatus.COMPLETED and batch.counts.failed > 0
    return "failed" if has_failed else _JOB_ENDINGS[batch.status]
