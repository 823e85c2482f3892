"""Records and settings of files, batches and jobs, and the interface of the jobs deployment."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from prometheus_client.metrics_core import Metric as Family

from replicas.protocol import Band, Metric
from replicas.settings import check_bounds, setting
from serve_app.jobs.api.new_lines import NewLines
from serve_app.jobs.api.responses import StoredSums
from serve_app.jobs.api.usage import UsagePage, UsageQuery, UsageReport
from serve_app.tracing.context import TraceContext

JsonObject = dict[str, Any]
ItemT = TypeVar("ItemT")
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class BatchKind(Enum):
    """Origin of a batch. All asynchronous work is batches of lines; a job is a batch of one line."""

    FILE = "file"
    """POST /v1/batches: lines come from an uploaded file, and results go to files."""
    PROMPTS = "prompts"
    """POST /v1/batch/async."""
    MESSAGES = "messages"
    """POST /v1/messages/batches."""
    JOB = "job"
    """POST /v1/jobs and /generate."""
    DELETED = "deleted"
    """Batch that its tenant has deleted: no endpoint shows it, and its lines and its record are deleted soon."""


class BatchStatus(Enum):
    """Status of a batch, in OpenAI's words."""

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
        """True if the status never changes again."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)

    @property
    def summary(self) -> str:
        """Coarser status: `pending`, `processing`, `completed`, `failed` or `cancelled`."""
        return _SUMMARIES.get(self, self.value)


_SUMMARIES = {
    BatchStatus.VALIDATING: "pending",
    BatchStatus.IN_PROGRESS: "processing",
    BatchStatus.FINALIZING: "processing",
    BatchStatus.EXPIRED: "failed",
    BatchStatus.CANCELLING: "processing",
}


class LineStatus(Enum):
    """Status of one line, which is one request of a batch."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Record of an uploaded or produced file. The file store keeps its bytes under the same id."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_unix_s: float
    expires_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason for which a batch failed: an error of the whole batch or of one line of its file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line, from 1; None: the error is about the whole batch."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Numbers of a batch's lines."""

    total: int = 0
    completed: int = 0
    """Lines that succeeded."""
    failed: int = 0
    """Lines that failed, expired or were cancelled."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Batch to be submitted.

    Either `input_file_id` or `lines` is set. `band` is already limited to the principal's ceiling.
    """

    kind: BatchKind
    tenant: str
    endpoint: str
    """`/v1/chat/completions` or `/v1/completions`."""
    band: Band
    window_s: float | None
    """Seconds after acceptance at which an unfinished batch expires; None: never."""
    input_file_id: str | None = None
    lines: NewLines = field(default_factory=NewLines)
    metadata: Mapping[str, str] | None = None
    callback_url: str | None = None
    idempotency_key: str | None = None
    body_digest: str | None = None
    """Hex SHA-256 of the canonical body. The same idempotency key with another digest is refused."""
    request_id: str | None = None
    output_expires_after_s: float | None = None
    """Seconds after their creation at which the output and error files expire; None: never."""
    band_ceiling: Band = Band.STANDARD
    """Most urgent band that the batch may be raised to when it is late: the principal's ceiling."""
    trace: TraceContext | None = None
    """Span that asked for the batch; its webhook hands the context on."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """State of a batch. Times are unix seconds; a time that has not come is None."""

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
    """Prompt tokens that were found in a KV cache."""
    num_undone: int = 0
    """Failed lines that the batch's cancellation or expiry ended."""
    eta_s: float | None = None
    """Estimated seconds until the batch is done; None: not known."""

    @property
    def ended_unix_s(self) -> float | None:
        """Time at which the batch became final; None: it is not final."""
        ended: float | None = getattr(self, f"{self.status.value}_unix_s") if self.status.is_final else None
        return ended


@dataclass(frozen=True, slots=True)
class LineRecord:
    """State of one line. `response` is the endpoint's answer, `error` an error object."""

    index: int
    custom_id: str
    status: LineStatus
    status_code: int | None
    response: JsonObject | None
    error: JsonObject | None


@dataclass(frozen=True, slots=True)
class Submission:
    """Result of submitting a NewBatch."""

    batch: BatchRecord
    is_new: bool
    """False: `batch` was submitted earlier with the same idempotency key."""


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """Part of a list."""

    items: tuple[ItemT, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request for a part of a list, newest first unless `is_ascending`."""

    limit: int
    after: str | None = None
    """Id of the last item of the page before; None: from the start."""
    is_ascending: bool = False


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Numbers of a tenant's batches by summary status, and their throughput."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int
    cancelled: int
    tokens_per_s: float
    """Output tokens per second over the last minute."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Batch that runs, as the dashboard shows it."""

    id: str
    tenant: str
    counts: RequestCounts
    has_webhook: bool
    """True if its end is told to a URL."""


@dataclass(frozen=True, slots=True)
class JobsCounts:
    """Metrics of the jobs workers: of their own work (`own`), and of their routers, as any ingress has them."""

    own: tuple[Metric, ...] = ()
    router: tuple[Family, ...] = ()
    """Families of each worker; the label `process` of their samples names it."""
    running: tuple[BatchProgress, ...] = ()
    """Newest batches that run, of all tenants; jobs, which have one line, are not among them."""
    stored: StoredSums | None = None
    """Sizes of stored responses and conversations; None: they are not known now."""


def new_id(kind: str) -> str:
    """Return a unique id that cannot be guessed (UUID 4)."""
    return f"{kind}-{uuid.uuid4().hex}" if kind == "file" else f"{kind}_{uuid.uuid4().hex}"


_ID_PREFIXES = {BatchKind.JOB: "job", BatchKind.MESSAGES: "msgbatch"}


def new_batch_id(kind: BatchKind) -> str:
    """Return an id for a new batch or job."""
    return new_id(_ID_PREFIXES.get(kind, "batch"))


@dataclass(frozen=True, slots=True)
class JobsSettings:
    """Limits and periods of a jobs worker; they never change while it runs."""

    model_name: str
    """Name of the served model. Batches of other models in the same database belong to other processes."""
    aliases: tuple[str, ...] = ()
    """Further names of the served model that lines may use."""
    max_line_bytes: int = 8 * 2**20
    """Longest line of an input file, bytes."""
    max_batch_lines: int = setting(50_000, ge=1)
    """Most requests in one batch."""
    max_file_bytes: int = setting(200 * 2**20, gt=0)
    """Size of the largest uploaded file, bytes."""
    max_unfinished_batches: int = 10_000
    """Most unfinished batches and jobs of one tenant. Further ones are refused with status 429."""
    max_unfinished_responses: int = 10_000
    """Most unfinished stored responses of one tenant. Further ones are refused with status 429."""
    max_unfinished_lines: int = setting(1_000_000, ge=1)
    """Most unfinished requests in the batches of one tenant. Further ones are refused with status 429."""
    job_lease_s: float = setting(10.0, gt=0)
    """Seconds without a heartbeat after which a jobs worker counts as dead and others do its work again."""
    keep_results_s: float = setting(30 * 86_400.0, gt=0)
    """Seconds after their end at which jobs and prompt batches are deleted. Files and their batches are kept."""
    keep_responses_s: float = setting(30 * 86_400.0, gt=0)
    """Seconds after their creation at which stored responses are deleted. Conversations are kept."""
    max_stored_bytes: int = setting(2**30, ge=2**20)
    """Most bytes of stored responses and conversations of one tenant. The oldest responses make room for new ones."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that lines may use for the served model."""
        return (self.model_name, *self.aliases)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: a fifth of the lease, so several may be missed before it ends."""
        return self.job_lease_s / 5


class JobsService(Protocol):
    """Interface of the jobs deployment to ingresses. An id of another tenant is treated as unknown.

    Every method raises only ServingErrors: `UnknownFile` and `UnknownBatch` for unknown ids, and those listed below.
    """

    async def add_file(self, file: FileRecord) -> None:
        """Record a file whose bytes are complete in the store."""

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file that has not expired."""

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Return a page of the tenant's files, only those of `purpose` unless it is None."""

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file's record and its bytes.

        Raises:
            FileInUse: it is the input of a batch that is not final.
        """

    async def submit(self, batch: NewBatch, batch_id: str) -> Submission:
        """Accept a batch durably: once this returns, no crash loses it. A second call with its id changes nothing.

        Raises:
            IdempotencyKeyInUse: its key was used before with another body.
            Overloaded: the tenant would have more unfinished batches or lines than it may.
        """

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch in its current state."""

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """Wait until the batch is final, at most `timeout_s`, and return it."""

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Return a page of the tenant's batches of one kind."""

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch and return it. A batch that is already closing continues.

        Raises:
            BatchNotCancellable: it is final.
        """

    async def delete_batch(self, tenant: str, batch_id: str) -> None:
        """Delete a batch that is final, with its results.

        Raises:
            BatchInProgress: it is not final.
        """

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Return lines with an index above `after_index` (-1: from the first), in order, of any status."""

    async def stats(self, tenant: str) -> BatchStats:
        """Return counts of the tenant's batches, and their throughput."""

    async def line_request(self, tenant: str | None, request_id: str) -> JsonObject | None:
        """Return the object `request` of a line that runs or ended recently; `tenant` None: of any tenant.

        None: there is no such line.
        """

    async def report_usage(self, report: UsageReport) -> None:
        """Add a process's usage durably, unless the report has come before."""

    async def usage(self, query: UsageQuery) -> UsagePage:
        """Return usage of the past, in order of day, tenant, model and band."""

    async def storage_fault(self) -> str | None:
        """Return the code of the storage's present failure, for `/health`; None: it works."""

    async def metrics(self) -> JobsCounts:
        """Return the metrics of all tenants' work, for `/metrics` (built by `serve_app.jobs.metrics`)."""


class JobsClient(Protocol):
    """Calls of a `JobsService`, and of a `ResponsesService`, in another process."""

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[ResultT]], *args: P.args, **arguments: P.kwargs
    ) -> ResultT:
        """Call a method, such as `JobsService.batch`, with these arguments; return its answer or raise its error."""
