"""Schemas of the answers about the server: its model, tokenizer, version, health and load."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from serve_app.openai.reply.schema import ReplyTier, RequestMetrics, described
from serve_app.reference.job_answers import StoredObject


@described
class ModelObject(TypedDict):
    """Served model."""

    id: str
    object: Literal["model"]
    created: int
    """Start of the process that answers, unix seconds."""
    owned_by: Literal["headway"]
    root: str
    """Hub id of the model, or its name if it comes from a directory."""
    parent: None
    max_model_len: int
    """Most tokens, prompt and output, of one sequence."""


@described
class ModelList(TypedDict):
    """List of the served models."""

    object: Literal["list"]
    data: list[ModelObject]


@described
class TokenizeReply(TypedDict):
    """Token ids of a prompt or of messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """Tokens as the vocabulary spells them, with `return_token_strs`."""


@described
class TokenizerInfo(TypedDict):
    """Facts about the tokenizer."""

    tokenizer_class: str
    vocab_size: int
    """Number of tokens, added ones included."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    """All tokens that are declared special."""
    chat_template: str | None
    tool_call_parser: str
    """Family of the chat template: the form of tool calls and reasoning."""


@described
class DetokenizeReply(TypedDict):
    """Text of token ids."""

    prompt: str


@described
class Welcome(TypedDict):
    """Name of the server, its model, and its addresses."""

    name: Literal["headway"]
    version: str
    model: str
    links: dict[str, str]
    """Path of each page, by its subject."""
    ray_dashboard: str | None
    """Address of Ray's dashboard, if this server knows it."""


@described
class EngineVersion(TypedDict):
    """Name and version of the inference engine, and of the libraries that it runs on."""

    name: Literal["headway"]
    version: str
    torch: str
    transformers: str


@described
class VersionReply(TypedDict):
    """Version of the server."""

    version: str
    engine: EngineVersion


@described
class LiveReply(TypedDict):
    """Answer of a live process."""

    status: Literal["live"]


@described
class ReadyReply(TypedDict):
    """Answer of a server that would serve a request now."""

    status: Literal["ready"]


@described
class HealthReply(ReadyReply):
    """Answer of a server that would serve a request now, with the state of its jobs process."""

    jobs: Literal["ok", "storage_full", "storage_unavailable", "unavailable"] | None
    """Code of what is wrong with the storage of files, batches and jobs, or `unavailable`: the jobs process does not
    answer. Other requests do not need it."""


@described
class CountByBand(TypedDict):
    """Number for each band."""

    interactive: int
    standard: int
    batch: int


@described
class ReplicaLoad(TypedDict):
    """Last known load of a replica."""

    replica_id: str
    node_id: str
    pid: int
    age_s: Annotated[float, Field(description="Seconds since the load was taken.")]
    num_in_flight: int
    num_slots: int
    num_running: int
    num_running_by_band: CountByBand
    num_waiting: int
    num_waiting_by_band: CountByBand
    waiting_tokens: int
    outstanding_tokens: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: Annotated[float, Field(description="Share of the blocks that sequences hold, 0 to 1.")]
    generated_tokens_per_s: float
    is_draining: bool


@described
class DrainReply(TypedDict):
    """Replica that takes no more requests."""

    replica_id: str
    status: Literal["draining"]


@described
class RequestObject(TypedDict):
    """Completion that runs or ended recently; it has no text."""

    id: str
    """The client's `x-request-id`, or the one that the server made."""
    object: Literal["request"]
    response_id: str | None
    """Id of the reply; null while the request is tokenized."""
    status: Literal["running", "cancelling", "completed", "cancelled", "failed"]
    part: str | None
    """Part of its time that a running completion is in, a name of `parts_ms`; null after its end, and while a line
    waits to be tried again."""
    path: str
    model: str
    stream: bool
    tenant: str
    band: Literal["interactive", "standard", "batch"]
    service_tier: ReplyTier
    created: int
    """Arrival, unix seconds."""
    http_status: int | None
    """Status of the answer; null while there is none."""
    error_code: str | None
    num_sequences: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reasons: list[str]
    replica_id: str | None
    """Replica that gave the last token."""
    metrics: RequestMetrics


@described
class WaitingWork(TypedDict):
    """Work that waits in a queue, as autoscaling sees it."""

    tokens: float
    due_s: float
    """Seconds until the work should be done."""


@described
class AutoscalingState(TypedDict):
    """Bounds on the number of replicas; after the first decision also the decision and its inputs."""

    min_replicas: int
    max_replicas: int
    target_drain_s: float
    downscale_delay_s: float
    desired_replicas: NotRequired[int]
    needed_replicas: NotRequired[int]
    num_replicas: NotRequired[int]
    drain_s: NotRequired[float | None]
    num_requests: NotRequired[int]
    num_running: NotRequired[int]
    waiting: NotRequired[list[WaitingWork]]
    replica_tokens_per_s: NotRequired[float]
    served_tokens_per_s: NotRequired[float]


@described
class LoadReply(TypedDict):
    """Load table of the process that answers."""

    replicas: list[ReplicaLoad]
    autoscaling: AutoscalingState | None


@described
class TenantInQueue(TypedDict):
    """Requests of a tenant that wait in a band."""

    tenant: str
    num_requests: int
    num_tokens: int


@described
class BandQueue(TypedDict):
    """Requests that wait in a band of the ingress that answers."""

    band: str
    num_requests: int
    num_tokens: int
    num_tenants: int
    tenants: list[TenantInQueue]
    """Tenants with most requests."""


@described
class Percentiles(TypedDict):
    """Median and 95th percentile."""

    p50: float
    p95: float


@described
class BandLatencies(TypedDict):
    """Latencies of the completions of a band that ended here in the last five minutes, seconds."""

    band: str
    num_requests: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    ttft_target_s: float | None
    tpot_target_s: float | None


@described
class JobsValue(TypedDict):
    """Metric of the jobs process."""

    name: str
    labels: dict[str, str]
    value: float | None
    """Value; null stands for infinity."""


@described
class PlacementCounts(TypedDict):
    """Most frequent reason for the placements of the shown requests on a replica."""

    reason: str
    num_placements: int
    of: int
    """Placements on the replica, for any reason."""


@described
class ShownReplica(ReplicaLoad):
    """Last known load of a replica, and the reason for which requests came to it."""

    chosen_for: PlacementCounts | None


@described
class ShownBatch(TypedDict):
    """Progress of a batch that runs."""

    id: str
    tenant: str
    num_lines: int
    num_completed: int
    num_failed: int
    has_webhook: bool


@described
class ShownStored(TypedDict):
    """Sizes of what all tenants have stored, and of those with most bytes."""

    num_tenants: int
    num_responses: int
    num_conversations: int
    num_bytes: int
    oldest_response_at: int | None
    tenants: list[StoredObject]


@described
class LoadPoint(TypedDict):
    """Load at one time."""

    time_unix_s: float
    tokens_per_s: float
    """Output tokens per second of all replicas."""
    num_running: int
    num_waiting: int
    """Requests that wait in the queues of the ingress that answers, and in the replicas'."""
    kv_usage: float
    """Share of the KV blocks that sequences hold, 0 to 1."""


@described
class DashboardSnapshot(TypedDict):
    """State of the server as the ingress that answers knows it."""

    time_unix_s: float
    model: str
    replicas: list[ShownReplica]
    queues: list[BandQueue]
    latencies: list[BandLatencies]
    autoscaling: AutoscalingState | None
    history: list[LoadPoint]
    """Load over the last hour, each 20 seconds, oldest first, as the ingress that answers has seen it."""
    jobs: list[JobsValue] | None
    """Metrics of the jobs process; null: it does not answer, or there is none."""
    batches: list[ShownBatch]
    stored: ShownStored | None
    """Stored responses and conversations; null: the jobs process does not answer, or there is none."""
    requests: list[RequestObject]
    """Completions that run, then those that ended, newest first."""
