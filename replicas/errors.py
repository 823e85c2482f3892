"""Errors: of a request, as one tree under `ServingError`, and of a model that cannot be loaded.

An error knows its `kind`, its `code` (the word clients see) and whether trying again may help.
Only `serve_app/errors.py` knows what each kind means in HTTP. Every argument goes to
`Exception.__init__`, so that errors survive pickling between processes.
"""

from __future__ import annotations

from enum import Enum, auto


class ErrorKind(Enum):
    """Kinds of errors that a transport tells apart."""

    INVALID = auto()
    NOT_FOUND = auto()
    CONFLICT = auto()
    """The state of what the request names does not allow it."""
    OVERLOADED = auto()
    ABORTED = auto()
    LOST = auto()
    """The process that served the request is gone."""
    UNAVAILABLE = auto()
    DEADLINE = auto()
    INTERNAL = auto()


class ServingError(Exception):
    """A request could not be served; `message` is written for the client."""

    kind: ErrorKind = ErrorKind.INTERNAL
    code: str = "internal_error"
    retryable: bool = False
    param: str | None = None
    """The field of the request that is at fault, if one is."""
    reason: str | None = None
    """The limit that left no room for the request, if one did."""
    retry_after_s: float | None = None
    """Seconds after which trying again may help, if known."""

    def __init__(self, message: str, *args: object) -> None:
        super().__init__(message, *args)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidRequest(ServingError):
    """The request can never be served as written; `param` names the offending field."""

    kind = ErrorKind.INVALID

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class UnknownModel(ServingError):
    """No such model is served here."""

    kind = ErrorKind.NOT_FOUND
    code = "model_not_found"
    param = "model"


class Overloaded(ServingError):
    """A queue is full; `retry_after_s` is when room is expected, 1 to 60 seconds.

    `reason` names the limit; `code` is `server_overloaded`, or `slow_down` where the request's own deadline is.
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
    """No replica accepts work; `code` says why: no_ready_replica, draining or model_loading."""

    kind = ErrorKind.UNAVAILABLE
    retryable = True

    def __init__(self, message: str, code: str = "no_ready_replica", retry_after_s: float = 5.0) -> None:
        super().__init__(message, code, retry_after_s)
        self.code = code
        self.retry_after_s = min(60.0, max(1.0, retry_after_s))


class DeadlineExceeded(ServingError):
    """The request's deadline passed before it was finished."""

    kind = ErrorKind.DEADLINE
    code = "deadline_exceeded"


class ReplicaLost(ServingError):
    """The replica that served the request is gone; `has_died`, or else it was stopped in good order."""

    kind = ErrorKind.LOST
    code = "replica_lost"
    retryable = True

    def __init__(self, message: str, has_died: bool = True) -> None:
        super().__init__(message, has_died)
        self.has_died = has_died


class RequestQuarantined(ServingError):
    """Every replica that the request was given to died, the last while it ran there alone."""

    code = "request_quarantined"


class EngineDead(ServingError):
    """The engine stopped after an error of its own; it answers nothing until it is replaced."""

    code = "engine_dead"
    retryable = True


class SequenceFailed(ServingError):
    """Computing this one sequence failed; its neighbours were not affected."""

    code = "internal_error"


class RequestAborted(ServingError):
    """The client went away or cancelled; never rendered."""

    kind = ErrorKind.ABORTED
    code = "request_aborted"


class ModelLoadError(Exception):
    """A model's files or options cannot be used; raised at start-up, before any request exists."""


class UnsupportedModel(ModelLoadError):
    """The model's code cannot run over a paged KV cache in a flat batch."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(model_type, reason)
        self.model_type = model_type
        self.reason = reason

    def __str__(self) -> str:
        return f"models of type {self.model_type!r} cannot be served: {self.reason}"
