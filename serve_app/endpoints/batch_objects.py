"""JSON objects of files and batches in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.jobs.api.records import BatchRecord, FileRecord
from serve_app.openai.reply.format import JsonObject

_UNITS = (("h", 3600), ("m", 60), ("s", 1))


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
        "request_counts": counts_object(batch),
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


def counts_object(batch: BatchRecord) -> JsonObject:
    """Return OpenAI's counts of a batch's lines."""
    counts = batch.counts
    return {"total": counts.total, "completed": counts.completed, "failed": counts.failed}


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
    if not batch.errors:
        return None
    data = [
        {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
        for error in batch.errors
    ]
    return {"object": "list", "data": data}


def _window(batch: BatchRecord) -> str | None:
    """Return the completion window in the largest unit that expresses it exactly."""
    if batch.expires_unix_s is None:
        return None
    window_s = round(batch.expires_unix_s - batch.created_unix_s)
    name, seconds = next(unit for unit in _UNITS if window_s % unit[1] == 0)
    return f"{window_s // seconds}{name}"
