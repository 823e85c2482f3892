"""Jobs, and the prompts of prompt batches, as clients see them."""

from __future__ import annotations

from serve_app.endpoints.batch_objects import unix_second
from serve_app.jobs.api.records import BatchRecord, BatchStatus, LineRecord, LineStatus
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.priority import tier_of

_STATUS_OF_LINE = {
    LineStatus.QUEUED: "queued",
    LineStatus.RUNNING: "running",
    LineStatus.SUCCEEDED: "completed",
    LineStatus.FAILED: "failed",
    LineStatus.EXPIRED: "expired",
    LineStatus.CANCELLED: "cancelled",
}
_STATUS_OF_STOPPED_BATCH = {
    BatchStatus.FAILED: "failed",
    BatchStatus.EXPIRED: "expired",
    BatchStatus.CANCELLING: "cancelling",
    BatchStatus.CANCELLED: "cancelled",
}


def job_status(job: BatchRecord, line: LineRecord | None) -> str:
    """How far a job is: queued, running, completed, failed, expired, cancelling or cancelled."""
    if line is None or line.status in (LineStatus.QUEUED, LineStatus.RUNNING):
        default = "queued" if line is None else _STATUS_OF_LINE[line.status]
        return _STATUS_OF_STOPPED_BATCH.get(job.status, default)
    return _STATUS_OF_LINE[line.status]


def job_object(job: BatchRecord, line: LineRecord | None) -> JsonObject:
    """A job; `result` is what its endpoint answered, `error` an error object; both are null until it ended."""
    return {
        "id": job.id,
        "object": "job",
        "status": job_status(job, line),
        "endpoint": job.endpoint,
        "service_tier": tier_of(job.band),
        "priority": job.band.value,
        "created_at": int(job.created_unix_s),
        "finished_at": unix_second(job.ended_unix_s),
        "expires_at": unix_second(job.expires_unix_s),
        "eta_seconds": job.eta_s,
        "callback_url": job.callback_url,
        "result": result_of(line),
        "error": _error_of(job, line),
    }


def status_object(job: BatchRecord, line: LineRecord | None) -> JsonObject:
    """The short form of the same, for /status."""
    return {
        "job_id": job.id,
        "status": job_status(job, line),
        "result": result_of(line),
        "error": _error_of(job, line),
    }


def result_of(line: LineRecord | None) -> JsonObject | None:
    """The endpoint's reply, where there is one."""
    return line.response if line is not None and line.status is LineStatus.SUCCEEDED else None


def line_error(line: LineRecord) -> JsonObject | None:
    """Why a line has no reply, as an error object: its own, or the one its endpoint answered."""
    if line.status is LineStatus.SUCCEEDED:
        return None
    error = line.error if line.error is not None else (line.response or {}).get("error")
    if error is None:
        return None
    kind = "timeout_error" if line.status is LineStatus.EXPIRED else "invalid_request_error"
    return {"message": None, "type": kind, "param": None, "code": None} | error


def prompt_output(line: LineRecord) -> JsonObject:
    """One prompt of an asynchronous prompt batch, whether it is done or not."""
    if line.status is LineStatus.SUCCEEDED and line.response is not None:
        return completed_output(line.index, line.response)
    return unfinished_output(line.index, _STATUS_OF_LINE[line.status], line_error(line))


def completed_output(index: int, reply: JsonObject) -> JsonObject:
    """What came of a prompt: the only choice of its completion, and what that cost."""
    return {
        **reply["choices"][0],
        "index": index,
        "status": "completed",
        "usage": reply["usage"],
        "error": None,
    }


def unfinished_output(index: int, status: str, error: JsonObject | None) -> JsonObject:
    """A prompt that has no completion, yet or for good."""
    return {"index": index, "status": status, "text": None, "finish_reason": None, "usage": None, "error": error}


def _error_of(job: BatchRecord, line: LineRecord | None) -> JsonObject | None:
    error = None if line is None else line_error(line)
    if error is None and job.errors:
        first = job.errors[0]
        return {"message": first.message, "type": "server_error", "param": first.param, "code": first.code}
    return error
