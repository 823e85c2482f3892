"""What the jobs deployment keeps, and what it offers to ingresses. Plain values; they cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client.metrics_core import Metric as Family

from replicas.protocol import Band, Metric


@dataclass(frozen=True, slots=True)
class JobsCounts:
    """What the jobs deployment counts: of its own work, and as one more ingress of the router."""

    own: tuple[Metric, ...] = ()
    router: tuple[Family, ...] = ()


JsonObject = dict[str, Any]
ItemT = TypeVar("ItemT")


class BatchKind(Enum):
    """Where a batch came from. Everything asynchronous is a batch of lines; a job is a batch of one."""

    FILE = "file"
    """POST /v1/batches: the lines are those of an uploaded file, and so are the results."""
    PROMPTS = "prompts"
    """POST /v1/batch/async."""
    JOB = "job"
    """POST /v1/jobs and /generate."""


class BatchStatus(Enum):
    """OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether it never changes again."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)

    @property
    def summary(self) -> str:
        """Coarser status: pending, processing, completed, failed or cancelled."""
        return _SUMMARIES.get(self, self.value)


_SUMMARIES = {
    BatchStatus.VALIDATING: "pending",
    BatchStatus.IN_PROGRESS: "processing",
    BatchStatus.FINALIZING: "processing",
    BatchStatus.EXPIRED: "failed",
    BatchStatus.CANCELLING: "processing",
}


class LineStatus(Enum):
    """How far one request of a batch is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded or produced file; its bytes are in the file store under its id."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_unix_s: float
    expires_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a whole batch failed, or what is wrong with one line of its file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Counted from 1."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    """Succeeded."""
    failed: int = 0
    """Failed, expired or cancelled."""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A request that a batch brings with it; what is wrong in its body fails it alone."""

    custom_id: str
    body: JsonObject


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that is asked for.

    Either `input_file_id` or `lines` is set. `band` is the one it may use (the principal's ceiling is applied).
    """

    kind: BatchKind
    tenant: str
    endpoint: str
    """`/v1/chat/completions` or `/v1/completions`."""
    band: Band
    window_s: float | None
    """It expires when it is not done so long after it was accepted, seconds; None: never."""
    input_file_id: str | None = None
    lines: tuple[NewLine, ...] = ()
    metadata: Mapping[str, str] | None = None
    callback_url: str | None = None
    idempotency_key: str | None = None
    body_digest: str | None = None
    """Hex SHA-256 of the canonical body: the same key with another digest is refused."""
    request_id: str | None = None
    output_expires_after_s: float | None = None
    """Its output and error files are deleted so long after they were made, seconds; None: kept."""
    band_ceiling: Band = Band.STANDARD
    """The most urgent band that it may be raised to when its deadline nears: the principal's ceiling."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it is now; a moment that has not come is None. All moments are unix seconds."""

    id: str
    kind: BatchKind
    tenant: str
    endpoint: str
    band: Band
    status: BatchStatus
    counts: RequestCounts
    created_unix_s: float
    expires_unix_s: float | None
    input_file_id: str | None
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[BatchError, ...]
    metadata: Mapping[str, str] | None
    callback_url: str | None
    request_id: str | None
    in_progress_unix_s: float | None = None
    finalizing_unix_s: float | None = None
    completed_unix_s: float | None = None
    failed_unix_s: float | None = None
    expired_unix_s: float | None = None
    cancelling_unix_s: float | None = None
    cancelled_unix_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt tokens, those that were found in a KV cache."""
    eta_s: float | None = None
    """Seconds until it should be done; None: not known."""

    @property
    def ended_unix_s(self) -> float | None:
        """Moment at which it became final; None: it has not."""
        ended: float | None = getattr(self, f"{self.status.value}_unix_s") if self.status.is_final else None
        return ended


@dataclass(frozen=True, slots=True)
class LineRecord:
    """One request of a batch; `response` is what the endpoint answered, `error` an error object."""

    index: int
    custom_id: str
    status: LineStatus
    status_code: int | None
    response: JsonObject | None
    error: JsonObject | None


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of a NewBatch."""

    batch: BatchRecord
    is_new: bool
    """False: the idempotency key had made it before."""


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """A part of a list."""

    items: tuple[ItemT, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list, newest first unless `is_ascending`."""

    limit: int
    after: str | None = None
    """Id of the last item that is known already."""
    is_ascending: bool = False


@dataclass(frozen=True, slots=True)
class BatchStats:
    """All batches of a tenant, by how far they are, and how fast they go."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int
    cancelled: int
    tokens_per_s: float
    """Output tokens, over the last minute."""


class JobsService(Protocol):
    """What ingresses ask of the jobs deployment. Another tenant's ids are unknown ids.

    Every method raises only ServingErrors: `UnknownFile` and `UnknownBatch` for ids, and as said below.
    """

    async def add_file(self, file: FileRecord) -> None:
        """Note a file whose bytes are complete in the store."""
        ...

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file that has not expired."""
        ...

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Some of the tenant's files."""
        ...

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file and delete its bytes; refused (`FileInUse`) while a batch that is not final reads it."""
        ...

    async def submit(self, batch: NewBatch) -> Submission:
        """Accept a batch; when this returns, no crash loses it.

        Raises:
            IdempotencyKeyInUse: its key came with another body.
            Overloaded: the tenant has as many batches or lines waiting as it may have.
        """
        ...

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch as it is now."""
        ...

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """The batch once it is final, or as it is after `timeout_s`."""
        ...

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Some of the tenant's batches of one kind."""
        ...

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch; one that is being cancelled stays so.

        Raises:
            BatchNotCancellable: it is final.
        """
        ...

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Lines behind `after_index` (-1: from the first), in order, whatever their status."""
        ...

    async def stats(self, tenant: str) -> BatchStats:
        """The tenant's batches in numbers."""
        ...

    async def metrics(self) -> JobsCounts:
        """What is counted of all tenants' work, for `/metrics` (`serve_app.jobs.metrics` makes them)."""
        ...
