"""Schemas of the answers about files, batches, jobs and prompt batches."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from serve_app.openai.reply.pooled_format import EmbeddingList, RankList, ScoreList
from serve_app.openai.reply.schema import (
    CachedTokens,
    ChatCompletion,
    ErrorDetails,
    FinishReason,
    RankedLogprob,
    ReasoningTokens,
    ReplyTier,
    RequestMetrics,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    UsageObject,
    described,
)
from serve_app.openai.request.job_schema import BatchEndpoint

JobStatus = Literal["queued", "running", "completed", "failed", "expired", "cancelling", "cancelled"]
JobResult = ChatCompletion | TextCompletion | EmbeddingList | ScoreList | RankList
"""Reply of the endpoint of a job."""
PromptBatchStatus = Literal["pending", "processing", "completed", "failed", "cancelled"]


@described
class FileObject(TypedDict):
    """OpenAI's file object."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


@described
class DeletedFile(TypedDict):
    """Confirmation of a deletion."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


@described
class ListFields(TypedDict):
    """Fields of a page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


@described
class FileList(ListFields):
    """Page of a list of files."""

    data: list[FileObject]


@described
class BatchErrorObject(TypedDict):
    """Reason for which a batch failed."""

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the file's line, from 1; null: the error is about the whole batch."""


@described
class BatchErrors(TypedDict):
    """Reasons for which a batch failed."""

    object: Literal["list"]
    data: list[BatchErrorObject]


@described
class RequestCountsObject(TypedDict):
    """Numbers of a batch's requests."""

    total: int
    completed: int
    failed: int
    """Requests that failed, expired or were cancelled."""


@described
class BatchUsage(TypedDict):
    """Token counts of a batch so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@described
class BatchObject(TypedDict):
    """OpenAI's batch object. Times are unix seconds; a time that has not come is null."""

    id: str
    object: Literal["batch"]
    endpoint: BatchEndpoint
    model: str
    errors: BatchErrors | None
    input_file_id: str | None
    completion_window: str | None
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCountsObject
    usage: BatchUsage
    metadata: dict[str, str] | None
    eta_seconds: float | None
    """Estimated seconds until the end; null: not known. OpenAI's object does not have it."""


@described
class BatchList(ListFields):
    """Page of a list of batches."""

    data: list[BatchObject]


@described
class UsageOfDay(TypedDict):
    """Usage of one day, tenant, model and band."""

    object: Literal["usage"]
    date: str
    """Day in UTC on which the work ended, such as `2026-01-31`."""
    tenant: str
    model: str
    band: Literal["interactive", "standard", "batch"]
    num_requests: int
    """Completions that were started; an attempt at a line of a batch is one."""
    input_tokens: int
    cached_tokens: int
    """Input tokens among these that were found in a KV cache."""
    output_tokens: int
    computed_tokens: int
    """Tokens that the replicas computed, input and output, each as often as they did."""
    wasted_tokens: int
    """Tokens among these that were computed again, after a preemption or on another replica, or for completions that
    were not answered to their end."""
    device_seconds: float
    """Computing time of the replicas: of a GPU, or of all threads of a replica on a processor. A step's time is
    divided among its sequences by their tokens."""


@described
class UsageList(TypedDict):
    """Usage in order of day, tenant, model and band."""

    object: Literal["list"]
    data: list[UsageOfDay]
    has_more: bool
    """True if there are more rows than `limit`; a shorter range of days has them."""
    start_date: str
    end_date: str


@described
class JobObject(TypedDict):
    """Job: one request that runs later."""

    id: str
    object: Literal["job"]
    status: JobStatus
    endpoint: BatchEndpoint
    service_tier: ReplyTier
    priority: int
    created_at: int
    finished_at: int | None
    expires_at: int | None
    eta_seconds: float | None
    callback_url: str | None
    result: JobResult | None
    """Reply of the endpoint; null until the job is completed."""
    error: ErrorDetails | None


@described
class SubmittedJob(TypedDict):
    """Job that was accepted in the short form."""

    job_id: str
    status: JobStatus


@described
class StatusObject(SubmittedJob):
    """Job in the short form."""

    result: JobResult | None
    error: ErrorDetails | None


@described
class SubmittedPromptBatch(TypedDict):
    """Prompt batch that was accepted."""

    batch_id: str
    status: PromptBatchStatus


@described
class PromptEnd(TypedDict):
    """End of one completed prompt."""

    index: Annotated[int, Field(description="Number of the prompt, from 0.")]
    status: Literal["completed"]
    usage: UsageObject
    error: None
    metrics: NotRequired[RequestMetrics]


@described
class CompletedOutput(PromptEnd):
    """Output of a completed prompt: its choice and usage."""

    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None] | None]


@described
class UnfinishedOutput(TypedDict):
    """Output of a prompt that waits, runs or has failed."""

    index: int
    status: Literal["queued", "running", "failed", "expired", "cancelled"]
    text: None
    finish_reason: None
    usage: None
    error: ErrorDetails | None


@described
class PromptBatchObject(SubmittedPromptBatch):
    """Prompt batch and its progress."""

    progress: float
    """Share of the prompts that are done, 0 to 1."""
    num_done: int
    request_counts: RequestCountsObject
    total_tokens: int
    eta_seconds: float | None
    created_at: int
    expires_at: int | None
    callback_url: str | None


@described
class PromptBatchPage(PromptBatchObject):
    """Prompt batch, its progress, and a page of its outputs."""

    outputs: list[CompletedOutput | UnfinishedOutput]
    has_more: bool


@described
class StoredObject(TypedDict):
    """Size of what a tenant has stored."""

    tenant: str
    num_responses: int
    num_conversations: int
    num_bytes: int
    oldest_response_at: int | None


@described
class StoredList(TypedDict):
    """Sizes of what tenants have stored."""

    object: Literal["list"]
    data: list[StoredObject]
    max_stored_bytes: int
    """Most bytes that a tenant may store."""


@described
class PromptBatchStats(TypedDict):
    """Numbers of all batches and jobs by status, and their throughput."""

    total_batches: int
    pending: int
    processing: int
    completed: int
    failed: int
    cancelled: int
    tokens_per_sec: float
    """Output tokens per second over the last minute."""


@described
class SyncProgress(TypedDict):
    """Progress of a prompt batch that is answered at once."""

    batch_id: str
    status: Literal["processing", "completed"]
    num_prompts: int
    num_completed: int
    num_failed: int
    total_tokens: int
    latency_ms: float
    throughput_tokens_per_sec: float


@described
class SyncPromptsReply(SyncProgress):
    """Outputs of all prompts in order."""

    outputs: list[CompletedOutput | UnfinishedOutput]


@described
class PromptPart(TextChoice):
    """Part of the output of one prompt."""
