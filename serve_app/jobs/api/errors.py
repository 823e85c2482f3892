"""Errors of files, batches and jobs."""

from __future__ import annotations

from replicas.errors import ErrorKind, ServingError


class UnknownFile(ServingError):
    """There is no such file, or it is another tenant's."""

    kind = ErrorKind.NOT_FOUND
    code = "file_not_found"


class UnknownBatch(ServingError):
    """There is no such batch or job, or it is another tenant's."""

    kind = ErrorKind.NOT_FOUND
    code = "batch_not_found"


class FileInUse(ServingError):
    """A batch that is not final still reads the file."""

    kind = ErrorKind.CONFLICT
    code = "file_in_use"


class IdempotencyKeyInUse(ServingError):
    """The key came before with another body."""

    kind = ErrorKind.CONFLICT
    code = "idempotency_key_in_use"


class BatchNotCancellable(ServingError):
    """The batch has ended."""

    kind = ErrorKind.CONFLICT
    code = "batch_not_cancellable"


class UnknownJob(UnknownBatch):
    """There is no such job, or it is another tenant's."""

    code = "job_not_found"
