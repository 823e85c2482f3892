"""Mapping of errors to HTTP statuses, bodies and headers; no other module maps errors to HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from replicas.errors import ErrorKind, ServingError

_MAX_SHOWN_CHARS = 50
_MAX_IDS = 10
"""Most ids that one error names."""

MESSAGES_PATH = "/v1/messages"
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status; all others are `invalid_request_error` below 500, and `api_error` from there
on."""

Headers = tuple[tuple[str, str], ...]

DO_NOT_RETRY: Headers = (("x-should-retry", "false"),)
"""Headers that stop the OpenAI SDKs' retries, which otherwise follow 408, 409, 429 and every status from 500 on."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Reply to a failed request; its body is an error object, also as an event of a stream."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    headers: Headers = ()
    refused_by: str | None = None
    """Limit that caused a 429, as the label `reason` of the refusal metric; None: no limit did."""

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body_at(self, path: str, request_id: str | None = None) -> dict[str, object]:
        """Return the error object of the API that has a path: Anthropic's for messages, OpenAI's for all others."""
        if not is_of_messages(path):
            return self.body
        kind = _MESSAGE_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message, "details": {"error_code": self.code}}
        identity = {} if request_id is None else {"request_id": request_id}
        return {"type": "error", "error": error, **identity}


def is_of_messages(path: str) -> bool:
    """Return True for a path of Anthropic's Messages API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class HttpError(Exception):
    """Error of the HTTP layer with a reply of its own, such as a wrong path, key or content type."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply)
        self.reply = reply


_MEANINGS = {
    ErrorKind.INVALID: (400, "invalid_request_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.CONFLICT: (409, "conflict"),
    ErrorKind.OVERLOADED: (429, "rate_limit_error"),
    ErrorKind.ABORTED: (499, "invalid_request_error"),
    ErrorKind.INTERNAL: (500, "server_error"),
    ErrorKind.LOST: (502, "server_error"),
    ErrorKind.UNAVAILABLE: (503, "service_unavailable_error"),
    ErrorKind.DEADLINE: (504, "timeout_error"),
}
"""Map from an error's kind to its status and its type in the body."""


def reply_to(error: BaseException, request_id: str) -> ErrorReply:
    """Return the reply to `error`; an unexpected error is a 500 with the request id under which it was logged."""
    if isinstance(error, HttpError):
        return error.reply
    serving_error = _unwrapped(error)
    if serving_error is None:
        message = f"internal error; the server's log has it under request id {request_id}"
        return ErrorReply(500, message, "server_error", "internal_error")
    status, error_type = _MEANINGS[serving_error.kind]
    return ErrorReply(
        status,
        serving_error.message,
        error_type,
        serving_error.code,
        serving_error.param,
        _retry_headers(serving_error, status),
        serving_error.reason,
    )


def is_expected(error: BaseException) -> bool:
    """Return True if the reply to `error` describes its cause, so that the log needs no traceback."""
    return isinstance(error, HttpError) or _unwrapped(error) is not None


def _unwrapped(error: BaseException) -> ServingError | None:
    """Return the ServingError that `error` is or contains, or None.

    Ray re-raises an error of a replica as an instance of a generated subclass, without a call of the constructor. Its
    text is the remote traceback, and `cause` is the original error.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, ServingError):
        return cause
    return error if isinstance(error, ServingError) else None


def _retry_headers(error: ServingError, status: int) -> Headers:
    """Return the headers with the time of a retry, or those that stop the SDKs from retrying a permanent error."""
    if not error.retryable:
        return DO_NOT_RETRY if status == 409 or status >= 500 else ()
    if error.retry_after_s is None:
        return ()
    return (
        ("retry-after", str(math.ceil(error.retry_after_s))),
        ("retry-after-ms", str(round(error.retry_after_s * 1000))),
    )


def shortened(value: object) -> str:
    """Return a client's value for an error message, cut after 50 characters."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def shown(value: object) -> str:
    """Return a client's value as JSON for an error message, cut after 50 characters; numbers are plain digits."""
    if isinstance(value, float):
        return shortened(int(value) if value.is_integer() else format(Decimal(repr(value)), "f"))
    return shortened(json.dumps(value, ensure_ascii=False))


def route_not_found(method: str, path: str, hint: str | None = None) -> HttpError:
    """Return the 404 for a path without a route; `hint` says what to use in place of a path of another API.

    Under /v1/ and with a hint the message says that the endpoint is not supported.
    """
    if path.startswith("/v1/") or hint is not None:
        message = f"{shortened(method)} {shortened(path)} is not supported by this server"
        message += "" if hint is None else f": {hint}"
        return HttpError(ErrorReply(404, message, "not_found_error", "unsupported_endpoint"))
    return HttpError(ErrorReply(404, f"no route matches {shortened(path)}", "not_found_error", "not_found"))


def method_not_allowed(method: str, path: str, allowed: str) -> HttpError:
    """Return the 405 for a path's wrong method; `allowed` is the value of the Allow header."""
    message = f"{shortened(path)} does not accept {shortened(method)}; it accepts {allowed}"
    headers = (("allow", allowed),)
    return HttpError(ErrorReply(405, message, "invalid_request_error", "method_not_allowed", headers=headers))


def host_not_allowed(host: str) -> HttpError:
    """Return the 403 for a host that is not allowed; `host` is the value of the Host header, empty without one."""
    message = f"the Host header {shortened(host)!r} is not one of allowed_hosts"
    return HttpError(ErrorReply(403, message, "permission_error", "host_not_allowed"))


def origin_not_allowed(origin: str) -> HttpError:
    """Return the 403 for a web page that may not call this server; `origin` is the value of the Origin header."""
    message = f"web pages of the origin {shortened(origin)!r} may not call this server: it is not in allowed_origins"
    return HttpError(ErrorReply(403, message, "permission_error", "origin_not_allowed"))


def unsupported_media_type(content_type: str | None, expected: str = "application/json") -> HttpError:
    """Return the 415 for a content type other than `expected`."""
    given = f"is `{shortened(content_type)}`" if content_type else "is missing"
    message = f"the content type {given}; the body must be {expected}"
    return HttpError(ErrorReply(415, message, "invalid_request_error", "unsupported_media_type"))


def body_too_large(max_body_bytes: int, what: str = "the body") -> HttpError:
    """Return the 413 for a body, or another part named by `what`, above its limit."""
    message = f"{what} has more than {max_body_bytes} bytes, the most that is accepted"
    return HttpError(ErrorReply(413, message, "invalid_request_error", "request_too_large"))


def upload_too_slow(limit_s: float) -> HttpError:
    """Return the 408 for a body that did not arrive in time."""
    message = f"the body did not arrive within {limit_s:.10g} s"
    return HttpError(ErrorReply(408, message, "timeout_error", "upload_timeout", headers=DO_NOT_RETRY))


def invalid_api_key(message: str) -> HttpError:
    """Return the 401 for a missing or unknown API key."""
    headers = (("www-authenticate", 'Bearer realm="headway"'),)
    return HttpError(ErrorReply(401, message, "authentication_error", "invalid_api_key", headers=headers))


def operator_key_required() -> HttpError:
    """Return the 403 for an API key without `operator: true` on a route for operators."""
    message = "this route needs an operator's API key: `operator: true` in the key file"
    return HttpError(ErrorReply(403, message, "permission_error", "operator_key_required"))


def replica_not_found(replica_id: str) -> HttpError:
    """Return the 404 for a model replica that is not running."""
    message = f"no model replica {shortened(replica_id)} is running; GET /load lists them"
    return HttpError(ErrorReply(404, message, "not_found_error", "replica_not_found", "replica_id"))


def request_not_found(request_id: str) -> HttpError:
    """Return the 404 for a completion that this ingress does not know, or that belongs to another tenant."""
    message = f"no completion {shortened(request_id)} runs or ended here within the last hour"
    return HttpError(ErrorReply(404, message, "not_found_error", "request_not_found", "request_id"))


def request_not_cancellable(request_id: str) -> HttpError:
    """Return the 409 for a completion that has ended."""
    message = f"the completion {shortened(request_id)} has ended"
    return HttpError(
        ErrorReply(409, message, "conflict", "request_not_cancellable", "request_id", headers=DO_NOT_RETRY)
    )


def line_not_cancellable(request_id: str) -> HttpError:
    """Return the 409 for a line of a job or batch, which is cancelled with it."""
    message = f"{shortened(request_id)} is a line of a job or batch; cancel the job or the batch"
    return HttpError(
        ErrorReply(409, message, "conflict", "request_not_cancellable", "request_id", headers=DO_NOT_RETRY)
    )


def request_id_ambiguous(request_id: str, sequence_ids: Sequence[str]) -> HttpError:
    """Return the 409 for an id under which completions of several tenants run; `sequence_ids` are their unique ids."""
    listed = ", ".join(f"`{each}`" for each in sequence_ids[:_MAX_IDS])
    if len(sequence_ids) > _MAX_IDS:
        listed += f" and {len(sequence_ids) - _MAX_IDS} more"
    message = f"completions of several tenants run under the id {shortened(request_id)}; cancel one of {listed}"
    return HttpError(ErrorReply(409, message, "conflict", "request_id_ambiguous", "request_id", headers=DO_NOT_RETRY))


def http_failure(status: int, detail: str, headers: Sequence[tuple[str, str]] = ()) -> HttpError:
    """Return the error for any other status that the web framework itself gives."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return HttpError(ErrorReply(status, detail, kind, "http_error", headers=tuple(headers)))
