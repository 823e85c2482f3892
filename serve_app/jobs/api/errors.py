"""Errors of files, batches and jobs."""

from __future__ import annotations

from replicas.errors import ErrorKind, ServingError


class UnknownFile(ServingError):
    """Error for a file that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "file_not_found"


class UnknownBatch(ServingError):
    """Error for a batch or job that does not exist or belongs to another tenant."""

    kind = ErrorKind.NOT_FOUND
    code = "batch_not_found"


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


class UnknownJob(UnknownBatch):
    """Error for a job that does not exist or belongs to another tenant."""

    code = "job_not_found"
