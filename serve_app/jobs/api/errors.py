"""Errors of files, batches and jobs, also of their storage."""

from __future__ import annotations

import errno

from replicas.errors import ErrorKind, ServingError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_RETRY_S = 30.0
_RETRY_S = 5.0


class UnknownFile(ServingError):
    """Error for a file that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "file_not_found"


class UnknownBatch(ServingError):
    """Error for a batch or job that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "batch_not_found"


class UnknownJob(UnknownBatch):
    """Error for a job that does not exist or belongs to another tenant."""

    code = "job_not_found"


class UnknownResponse(ServingError):
    """Error for a stored response that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "response_not_found"


class UnknownPreviousResponse(UnknownResponse):
    """Error for a response that a request continues, and that is not stored, or not any more."""

    code = "previous_response_not_found"
    param = "previous_response_id"


class UnknownConversation(ServingError):
    """Error for a conversation that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "conversation_not_found"


class UnknownItem(UnknownConversation):
    """Error for an item that is not stored, or not in a conversation."""

    code = "item_not_found"


class FileInUse(ServingError):
    """Refusal to delete the input file of a batch that is not final."""

    kind = ErrorKind.CONFLICT
    code = "file_in_use"


class IdempotencyKeyInUse(ServingError):
    """Refusal of an idempotency key that was used before with another body."""

    kind = ErrorKind.CONFLICT
    code = "idempotency_key_in_use"


class BatchNotCancellable(ServingError):
    """Refusal to cancel a batch that is final."""

    kind = ErrorKind.CONFLICT
    code = "batch_not_cancellable"


class BatchInProgress(ServingError):
    """Refusal to delete a batch, or to show its results, before it is final."""

    kind = ErrorKind.CONFLICT
    code = "batch_in_progress"


class StorageUnavailable(ServingError):
    """Refusal because the database or the files of jobs cannot be used; nothing of the request was accepted.

    `code` is `storage_full` or `storage_unavailable`.
    """

    kind = ErrorKind.UNAVAILABLE
    retryable = True

    def __init__(self, message: str, code: str, retry_after_s: float) -> None:
        super().__init__(message, code, retry_after_s)
        self.code = code
        self.retry_after_s = retry_after_s


def storage_unavailable(is_full: bool) -> StorageUnavailable:
    """Return the error; its message names no path and no address, which the log has."""
    if is_full:
        return StorageUnavailable("the storage of files and jobs is full", "storage_full", _FULL_RETRY_S)
    message = "the storage of files and jobs cannot be used now; the server's log says why"
    return StorageUnavailable(message, "storage_unavailable", _RETRY_S)


def storage_error_of(error: OSError) -> StorageUnavailable:
    """Return the error for a failure of the operating system while it used the storage."""
    return storage_unavailable(error.errno in _FULL)
