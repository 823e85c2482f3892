"""JSON objects of files, batches, jobs and the outputs of prompt batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from serve_app.jobs.api.records import BatchRecord, BatchStatus, FileRecord, LineRecord, LineStatus
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.caller import tier_of

_UNITS = (("h", 3600), ("m", 60), ("s", 1))
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
    metrics = {"metrics": reply["metrics"]} if "metrics" in reply else {}
    return {
        **reply["choices"][0],
        "index": index,
        "status": "completed",
        "usage": reply["usage"],
        "error": None,
        **metrics,
    }


def unfinished_output(index: int, status: str, error: JsonObject | None) -> JsonObject:
    """Return the output of a prompt without a completion: unfinished, failed, expired or cancelled."""
    return {"index": index, "status": status, "text": None, "finish_reason": None, "usage": None, "error": error}


def file_object(file: FileRecord) -> JsonObject:
    """Return OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_unix_s),
        "expires_at": unix_second(file.expires_unix_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRecord, model_name: str) -> JsonObject:
    """Return OpenAI's batch object with the additional field `eta_seconds`, the estimated time left."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model_name,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": _window(batch),
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **_moments(batch),
        "request_counts": asdict(batch.counts),
        "usage": {
            "input_tokens": batch.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.num_cached_tokens},
            "output_tokens": batch.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.num_prompt_tokens + batch.num_output_tokens,
        },
        "metadata": None if batch.metadata is None else dict(batch.metadata),
        "eta_seconds": batch.eta_s,
    }


def list_object(items: Sequence[JsonObject], has_more: bool) -> JsonObject:
    """Return OpenAI's page of a list; every item has an `id`."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def unix_second(moment_unix_s: float | None) -> int | None:
    """Return a time in whole unix seconds; None stays None: the event has not happened."""
    return None if moment_unix_s is None else int(moment_unix_s)


def _error_of(job: BatchRecord, line: LineRecord | None) -> JsonObject | None:
    error = None if line is None else line_error(line)
    if error is None and job.errors:
        first = job.errors[0]
        return {"message": first.message, "type": "server_error", "param": first.param, "code": first.code}
    return error


def _moments(batch: BatchRecord) -> JsonObject:
    moments = {
        "created_at": batch.created_unix_s,
        "in_progress_at": batch.in_progress_unix_s,
        "expires_at": batch.expires_unix_s,
        "finalizing_at": batch.finalizing_unix_s,
        "completed_at": batch.completed_unix_s,
        "failed_at": batch.failed_unix_s,
        "expired_at": batch.expired_unix_s,
        "cancelling_at": batch.cancelling_unix_s,
        "cancelled_at": batch.cancelled_unix_s,
    }
    return {name: unix_second(moment) for name, moment in moments.items()}


def _errors(batch: BatchRecord) -> JsonObject | None:
    return {"object": "list", "data": [asdict(error) for error in batch.errors]} if batch.errors else None


def _window(batch: BatchRecord) -> str | None:
    """Return the completion window in whole hours, else in whole minutes, else in seconds."""
    if batch.expires_unix_s is None:
        return None
    window_s = round(batch.expires_unix_s - batch.created_unix_s)
    name, seconds = next(unit for unit in _UNITS if window_s % unit[1] == 0)
    return f"{window_s // seconds}{name}"
