"""HTTP statuses, bodies and headers of errors; no other module maps errors to HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replicas.errors import ErrorKind, ServingError

_MAX_SHOWN_CHARS = 50

Headers = tuple[tuple[str, str], ...]

DO_NOT_RETRY: Headers = (("x-should-retry", "false"),)
"""Stops the OpenAI SDKs, which otherwise send 408, 409, 429 and every status from 500 on again."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as the client sees it; the body is OpenAI's error object, on SSE streams too."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    headers: Headers = ()
    refused_by: str | None = None
    """The limit that left no room for the request, where one did."""

    @property
    def body(self) -> dict[str, object]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class HttpError(Exception):
    """A request that HTTP itself refuses, before anything is served."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class _Meaning:
    status: int
    type: str


_MEANINGS = {
    ErrorKind.INVALID: _Meaning(400, "invalid_request_error"),
    ErrorKind.NOT_FOUND: _Meaning(404, "not_found_error"),
    ErrorKind.CONFLICT: _Meaning(409, "conflict"),
    ErrorKind.OVERLOADED: _Meaning(429, "rate_limit_error"),
    ErrorKind.ABORTED: _Meaning(499, "invalid_request_error"),
    ErrorKind.INTERNAL: _Meaning(500, "server_error"),
    ErrorKind.LOST: _Meaning(502, "server_error"),
    ErrorKind.UNAVAILABLE: _Meaning(503, "service_unavailable_error"),
    ErrorKind.DEADLINE: _Meaning(504, "timeout_error"),
}


def reply_to(error: BaseException, request_id: str) -> ErrorReply:
    """Return the reply to `error`; to an error that is no ServingError, only the id under which it was logged."""
    if isinstance(error, HttpError):
        return error.reply
    serving_error = _unwrapped(error)
    if serving_error is None:
        message = f"internal error; the server's log has it under request id {request_id}"
        return ErrorReply(500, message, "server_error", "internal_error")
    meaning = _MEANINGS[serving_error.kind]
    return ErrorReply(
        meaning.status,
        serving_error.message,
        meaning.type,
        serving_error.code,
        serving_error.param,
        _retry_headers(serving_error, meaning.status),
        serving_error.reason,
    )


def is_expected(error: BaseException) -> bool:
    """Whether the reply to `error` says what happened, so that no traceback is needed."""
    return isinstance(error, HttpError) or _unwrapped(error) is not None


def _unwrapped(error: BaseException) -> ServingError | None:
    """The ServingError that `error` is or carries.

    Ray re-raises an error of a replica as an instance of a made-up subclass that never ran our
    constructor, shows the remote traceback as its text, and keeps the original in `cause`.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, ServingError):
        return cause
    return error if isinstance(error, ServingError) else None


def _retry_headers(error: ServingError, status: int) -> Headers:
    """When to try again, or not to where the SDKs would; the error itself knows whether that may help."""
    if not error.retryable:
        return DO_NOT_RETRY if status == 409 or status >= 500 else ()
    if error.retry_after_s is None:
        return ()
    return (
        ("retry-after", str(math.ceil(error.retry_after_s))),
        ("retry-after-ms", str(round(error.retry_after_s * 1000))),
    )


def shortened(value: object) -> str:
    """What a client sent, as a message repeats it: its beginning, where it is long."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def route_not_found(method: str, path: str) -> HttpError:
    """404; of OpenAI's API says that the endpoint is not supported, of other paths that nothing is there."""
    if path.startswith("/v1/"):
        message = f"{shortened(method)} {shortened(path)} is not supported by this server"
        return HttpError(ErrorReply(404, message, "not_found_error", "unsupported_endpoint"))
    return HttpError(ErrorReply(404, f"there is nothing at {shortened(path)}", "not_found_error", "not_found"))


def method_not_allowed(method: str, path: str, allowed: str) -> HttpError:
    """405; `allowed` is the value of the Allow header."""
    message = f"{shortened(path)} does not take {shortened(method)}; it takes {allowed}"
    headers = (("allow", allowed),)
    return HttpError(ErrorReply(405, message, "invalid_request_error", "method_not_allowed", headers=headers))


def host_not_allowed(host: str) -> HttpError:
    """403; `host` is the value of the Host header, empty where there is none."""
    message = f"the Host header {shortened(host)!r} is not one of allowed_hosts"
    return HttpError(ErrorReply(403, message, "permission_error", "host_not_allowed"))


def unsupported_media_type(content_type: str | None, expected: str = "application/json") -> HttpError:
    """415; an endpoint takes one type."""
    given = f"is `{shortened(content_type)}`" if content_type else "is missing"
    message = f"the content type {given}; the body must be {expected}"
    return HttpError(ErrorReply(415, message, "invalid_request_error", "unsupported_media_type"))


def body_too_large(max_body_bytes: int, what: str = "the body") -> HttpError:
    """413."""
    message = f"{what} has more than {max_body_bytes:,} bytes".replace(",", " ") + ", the most that is accepted"
    return HttpError(ErrorReply(413, message, "invalid_request_error", "request_too_large"))


def upload_too_slow(limit_s: float) -> HttpError:
    """408."""
    message = f"the body did not arrive within {limit_s:g} s"
    return HttpError(ErrorReply(408, message, "timeout_error", "upload_timeout", headers=DO_NOT_RETRY))


def invalid_api_key(message: str) -> HttpError:
    """401."""
    headers = (("www-authenticate", 'Bearer realm="headway"'),)
    return HttpError(ErrorReply(401, message, "authentication_error", "invalid_api_key", headers=headers))


def http_failure(status: int, detail: str, headers: Sequence[tuple[str, str]] = ()) -> HttpError:
    """Any other status that the web framework answers with by itself."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return HttpError(ErrorReply(status, detail, kind, "http_error", headers=tuple(headers)))
