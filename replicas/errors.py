"""Errors of requests, as one tree under `ServingError`, and errors of loading a model.

An error has a `kind`, a `code` that clients see, and `retryable`, which says if a retry may help. Only
`serve_app/errors.py` maps kinds to HTTP. Every argument goes to `Exception.__init__`, so that errors survive pickling
between processes. `is_cancelled` tells a task's own cancellation from that of the work it awaits.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto


class ErrorKind(Enum):
    """Kind of an error, as a transport needs it."""

    INVALID = auto()
    NOT_FOUND = auto()
    CONFLICT = auto()
    """The object that the request names is in a state that does not allow the request."""
    OVERLOADED = auto()
    ABORTED = auto()
    LOST = auto()
    """The process that served the request is gone."""
    UNAVAILABLE = auto()
    DEADLINE = auto()
    INTERNAL = auto()


class ServingError(Exception):
    """Failure of a request; `message` is written for the client."""

    kind: ErrorKind = ErrorKind.INTERNAL
    code: str = "internal_error"
    retryable: bool = False
    param: str | None = None
    """Field of the request that caused the error, if one did."""
    reason: str | None = None
    """Name of the limit that the request exceeded, if it exceeded one."""
    retry_after_s: float | None = None
    """Seconds after which a retry may help, if known."""

    def __init__(self, message: str, *args: object) -> None:
        super().__init__(message, *args)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidRequest(ServingError):
    """Error of a request that can never be served as written; `param` names the offending field."""

    kind = ErrorKind.INVALID

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class UnknownModel(ServingError):
    """Error of a request for a model that is not served here."""

    kind = ErrorKind.NOT_FOUND
    code = "model_not_found"
    param = "model"


class Overloaded(ServingError):
    """Refusal because a queue is full; room is expected after `retry_after_s`, 1 to 60 seconds.

    `reason` names the limit. `code` is `slow_down` for the request's own deadline, `rate_limit_exceeded` for a limit of
    the client's tenant or key, and `server_overloaded` for any other limit.
    """

    kind = ErrorKind.OVERLOADED
    retryable = True
    reason: str
    retry_after_s: float

    def __init__(
        self,
        message: str,
        retry_after_s: float = 1.0,
        reason: str = "max_num_queued_reqs",
        code: str = "server_overloaded",
    ) -> None:
        super().__init__(message, retry_after_s, reason, code)
        self.retry_after_s = min(60.0, max(1.0, retry_after_s))
        self.reason = reason
        self.code = code


class NoReplicaAvailable(ServingError):
    """Refusal because no replica accepts work; `code` is no_ready_replica, draining or model_loading."""

    kind = ErrorKind.UNAVAILABLE
    retryable = True

    def __init__(self, message: str, code: str = "no_ready_replica", retry_after_s: float = 5.0) -> None:
        super().__init__(message, code, retry_after_s)
        self.code = code
        self.retry_after_s = min(60.0, max(1.0, retry_after_s))


class DeadlineExceeded(ServingError):
    """Failure of a request whose deadline passed before it was finished."""

    kind = ErrorKind.DEADLINE
    code = "deadline_exceeded"


class ReplicaLost(ServingError):
    """Failure because the request's replica is gone. It has died if `has_died`; otherwise it was stopped gracefully."""

    kind = ErrorKind.LOST
    code = "replica_lost"
    retryable = True

    def __init__(self, message: str, has_died: bool = True) -> None:
        super().__init__(message, has_died)
        self.has_died = has_died


class RequestQuarantined(ServingError):
    """Final failure of a request on which three replicas died, the last while the request ran there alone."""

    code = "request_quarantined"


class EngineDead(ServingError):
    """Failure because the engine stopped after an internal error; its replica must be replaced."""

    code = "engine_dead"
    retryable = True


class SequenceFailed(ServingError):
    """Failure to compute this one sequence; the other sequences of its batch are not affected."""


class RequestAborted(ServingError):
    """End of a request whose client disconnected or cancelled; never sent to a client."""

    kind = ErrorKind.ABORTED
    code = "request_aborted"


class ModelLoadError(Exception):
    """Error in a model's files or options; raised at start-up, before any request exists."""


class UnsupportedModel(ModelLoadError):
    """Error of a model whose code cannot run over a paged KV cache in a flat batch."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(model_type, reason)
        self.model_type = model_type
        self.reason = reason

    def __str__(self) -> str:
        return f"models of type {self.model_type!r} cannot be served: {self.reason}"


def as_serving_error(error: BaseException) -> ServingError:
    """Return a `ServingError` as it is, and any other error of a replica as the failure of a sequence."""
    if isinstance(error, ServingError):
        return error
    return SequenceFailed(f"the replica failed: {type(error).__name__}: {error}")


def is_cancelled() -> bool:
    """Return True if the current task is being cancelled.

    Otherwise a CancelledError came from the work that the task awaits, such as a replica that is stopped and gives up
    its calls.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
