"""Words of the API reference: the introduction, and the meaning of headers and of failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DESCRIPTION = (
    "OpenAI's API for one model, with priorities, deadlines, jobs and batches. "
    "Null counts as a field that is not given. A field that is not supported and would change the answer is refused by "
    "name. A field that no API of this server has is ignored, and `x-headway-ignored` names it; with "
    "`unknown_fields=refuse` it is refused. "
    "Errors have OpenAI's error object as their body; in a stream it is the last event, and `[DONE]` is sent only "
    "after success. Lines that begin with a colon in a stream of events are comments."
)

FAILURES: Mapping[int, str] = {
    400: "The request is not valid. Codes: `invalid_value`, `missing_required_parameter`, `unsupported_parameter`, "
    "`context_length_exceeded`.",
    401: "No API key is given, or it is not known. Code: `invalid_api_key`.",
    403: "The `Host` header is not one of `allowed_hosts`, or a web page of an origin that is not one of "
    "`allowed_origins` calls, or the route is for operators. Codes: `host_not_allowed`, `origin_not_allowed`, "
    "`operator_key_required`.",
    404: "The model, file, batch, job, request or replica does not exist. Codes: `model_not_found`, `file_not_found`, "
    "`batch_not_found`, `job_not_found`, `request_not_found`, `replica_not_found`.",
    408: "The body did not arrive in time. Code: `upload_timeout`.",
    409: "The state of the object does not allow the request. Codes: `batch_not_cancellable`, `file_in_use`, "
    "`idempotency_key_in_use`, `request_id_ambiguous`, `request_not_cancellable`.",
    413: "The body or the file is too large. Code: `request_too_large`.",
    415: "The content type is wrong. Code: `unsupported_media_type`.",
    429: "A queue is full, or the deadline cannot be met. Codes: `server_overloaded`, `slow_down`. `retry-after` says "
    "when room is expected.",
    499: "The request was cancelled before its end. Code: `request_aborted`.",
    500: "The server failed. Code: `internal_error`, or another that names the failure.",
    502: "The replica that served the request is gone, and no other could continue. Code: `replica_lost`.",
    503: "No replica, or no jobs process, can serve the request now. Codes: `no_ready_replica`, `model_loading`, "
    "`draining`, `engine_stalled`, `reader_lost`; of files, batches and jobs also `storage_full`, "
    "`storage_unavailable`.",
    504: "The deadline passed. Code: `deadline_exceeded`.",
}
"""Description of a failure, by status."""

REQUEST_HEADERS: Mapping[str, Mapping[str, Any]] = {
    "idempotency-key": {
        "description": "Name of this submission: the same key with the same body returns the first submission.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    "request-timeout-ms": {
        "description": "Time until the deadline, milliseconds; 0 means none.",
        "schema": {"type": "number", "minimum": 0},
    },
    "traceparent": {
        "description": "Span of the caller in its trace (W3C Trace Context). A job's webhook hands the context on.",
        "schema": {"type": "string"},
    },
    "tracestate": {
        "description": "Data of tracing systems beside `traceparent` (W3C Trace Context).",
        "schema": {"type": "string"},
    },
    "x-headway-priority": {
        "description": "Band of the request, by name or number; the body's `priority` overrides it.",
        "schema": {"enum": ["interactive", "standard", "batch", "0", "1", "2"]},
    },
    "x-stainless-read-timeout": {
        "description": "Time-out that OpenAI's Python client sends, seconds; 600 and 0 mean none.",
        "schema": {"type": "number", "minimum": 0},
    },
    "x-stainless-timeout": {
        "description": "Time-out that OpenAI's JavaScript client sends, seconds; 600 and 0 mean none.",
        "schema": {"type": "number", "minimum": 0},
    },
}
"""Description and schema of the request headers with a meaning."""

ANSWER_HEADERS: Mapping[str, str] = {
    "x-request-id": "Id of the request in logs: the client's own `x-request-id`, or one that the server made.",
    "openai-processing-ms": "Time from the request's arrival to the answer's headers, milliseconds.",
    "x-model-replica": "Replica that served the request.",
    "x-headway-ignored": "Fields of the body that have no effect, such as `messages.0.cache_control`, percent-encoded; "
    "it ends in `...` if there are too many.",
    "x-headway-ignored-tools": "Tools that only another server can run; the model did not see them.",
    "x-headway-toy-model": "Only if the bundled demo model answers: it is for tests, and no answer of it is of use.",
    "x-headway-not-enforced": "Keywords of the request's JSON Schemas that are not enforced, as JSON pointers.",
    "x-ratelimit-limit-requests": "Most requests that may wait in the request's band.",
    "x-ratelimit-limit-tokens": "Most tokens that may wait in the request's band.",
    "x-ratelimit-remaining-requests": "Requests that may still wait in the request's band.",
    "x-ratelimit-remaining-tokens": "Tokens that may still wait in the request's band.",
    "x-ratelimit-reset-requests": "Time until nothing waits in the band, such as `8.64s`.",
    "x-ratelimit-reset-tokens": "Time until nothing waits in the band, such as `8.64s`.",
    "x-headway-has-more": "`true` if there are more rows than `limit`.",
    "location": "Path of the submitted work.",
    "retry-after": "Seconds after which the next poll or attempt is advised.",
}
"""Meaning of the headers of answers."""

FORM_FILE: Mapping[str, str] = {"type": "string", "format": "binary", "description": "File to upload, with its name."}
"""Schema of the file in a form."""

NO_EFFECT = "Accepted with these values alone; has no effect."
"""Description of a field that is accepted for compatibility."""
