"""JSON objects of jobs and of the outputs of prompt batches."""

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
    """Return a job's status: queued, running, completed, failed, expired, cancelling or cancelled."""
    if line is None or line.status in (LineStatus.QUEUED, LineStatus.RUNNING):
        default = "queued" if line is None else _STATUS_OF_LINE[line.status]
        return _STATUS_OF_STOPPED_BATCH.get(job.status, default)
    return _STATUS_OF_LINE[line.status]


def job_object(job: BatchRecord, line: LineRecord | None) -> JsonObject:
    """Return a job object; its `result` is the endpoint's reply or null, its `error` an error object or null."""
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
    """Return the short job object of GET /status."""
    return {
        "job_id": job.id,
        "status": job_status(job, line),
        "result": result_of(line),
        "error": _error_of(job, line),
    }


def result_of(line: LineRecord | None) -> JsonObject | None:
    """Return the endpoint's reply, or None if the line has not succeeded."""
    return line.response if line is not None and line.status is LineStatus.SUCCEEDED else None


def line_error(line: LineRecord) -> JsonObject | None:
    """Return the error object of a line: its own, or the one in its endpoint's reply; None without either."""
    if line.status is LineStatus.SUCCEEDED:
        return None
    error = line.error if line.error is not None else (line.response or {}).get("error")
    if error is None:
        return None
    kind = "timeout_error" if line.status is LineStatus.EXPIRED else "invalid_request_error"
    return {"message": None, "type": kind, "param": None, "code": None} | error


def prompt_output(line: LineRecord) -> JsonObject:
    """Return the output of one prompt of an asynchronous prompt batch, finished or not."""
    if line.status is LineStatus.SUCCEEDED and line.response is not None:
        return completed_output(line.index, line.response)
    return unfinished_output(line.index, _STATUS_OF_LINE[line.status], line_error(line))


def completed_output(index: int, reply: JsonObject) -> JsonObject:
    """Return the output of a completed prompt: the only choice of its completion, with the usage."""
    return {
        **reply["choices"][0],
        "index": index,
        "status": "completed",
        "usage": reply["usage"],
        "error": None,
    }


def unfinished_output(index: int, status: str, error: JsonObject | None) -> JsonObject:
    """Return the output of a prompt without a completion: unfinished, failed, expired or cancelled."""
    return {"index": index, "status": status, "text": None, "finish_reason": None, "usage": None, "error": error}


def _error_of(job: BatchRecord, line: LineRecord | None) -> JsonObject | None:
    error = None if line is None else line_error(line)
    if error is None and job.errors:
        first = job.errors[0]
        return {"message": first.message, "type": "server_error", "param": first.param, "code": first.code}
    return error
