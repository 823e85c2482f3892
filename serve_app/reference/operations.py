"""Operations of the HTTP API: the requests, answers and failures of every route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from serve_app.openai.reply.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorObject,
    TextCompletion,
    TextCompletionChunk,
)
from serve_app.openai.request import job_schema
from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.schema import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    TOKENIZE_IGNORED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from serve_app.reference import answers, job_answers

_DEADLINE = frozenset({"request-timeout-ms", "x-stainless-read-timeout", "x-stainless-timeout"})
_TRACE = frozenset({"traceparent", "tracestate"})
_URGENCY = _DEADLINE | _TRACE | {"x-headway-priority"}
_READ_BODY = frozenset({400, 408, 413, 415})
_GENERATE = _READ_BODY | {404, 429, 499, 502, 503, 504}
_SUBMIT = _READ_BODY | {404, 409, 429, 503}
_FIND = frozenset({404, 503})
_POLL_HEADERS = ("retry-after",)
_COMPLETION_HEADERS = ("x-model-replica", "x-headway-not-enforced", "x-ratelimit")


@dataclass(frozen=True, slots=True)
class Fields:
    """JSON body: the fields of one schema, with changes that its endpoint makes."""

    schema: type[BaseModel]
    ignored: IgnoredValues
    title: str | None = None
    """Name of the changed schema; None: nothing is changed."""
    added: type[BaseModel] | None = None
    """Schema of further fields."""
    dropped: tuple[str, ...] = ()
    """Fields of `schema` that the endpoint does not take."""
    optional: tuple[str, ...] = ()
    """Required fields of `schema` that may be left out here."""
    limited: Mapping[str, Mapping[str, Any]] | None = None
    """Further limits of single fields, as JSON Schema."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Form with one file and a few fields."""

    schema: type[BaseModel]


@dataclass(frozen=True, slots=True)
class Answer:
    """Successful answer in one media type; exactly one of the schemas is set for JSON and streams."""

    schema: Any = None
    """Type of the JSON body; None: the body is not JSON."""
    media_type: str = "application/json"
    events: tuple[Any, ...] = ()
    """Types of a stream's events or lines; the body is a text of them."""
    is_done_sent: bool = False
    """True if a complete stream ends with the event `[DONE]`."""


@dataclass(frozen=True, slots=True)
class Created:
    """Object that an operation creates."""

    path: str
    """Path of the object; its only parameter is the object's id."""
    id_field: str
    """Field of the answer with the id."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Description of one route."""

    group: str
    summary: str
    answers: tuple[Answer, ...]
    status: int = 200
    failures: frozenset[int] = frozenset()
    """Statuses of failures beyond those that every route has."""
    body: tuple[Fields, ...] | Upload | None = None
    """JSON bodies, one of which is sent, or a form; None: no body is read."""
    query: type[BaseModel] | None = None
    headers: frozenset[str] = frozenset()
    """Request headers with a meaning for this route."""
    answer_headers: tuple[str, ...] = ()
    created: Created | None = None
    """Object that the operation creates; None: it creates none."""


def _json(schema: Any) -> tuple[Answer, ...]:
    return (Answer(schema),)


def _stream(chunk: Any) -> Answer:
    return Answer(media_type="text/event-stream", events=(chunk, ErrorObject), is_done_sent=True)


_JOB: dict[str, Any] = {
    "added": job_schema.JobOptions,
    "limited": {"stream": {"const": False}, "deadline_ms": {"maximum": job_schema.MAX_WINDOW_S * 1000}},
}
_PROMPTS_IGNORED: IgnoredValues = {**COMPLETION_IGNORED, "prompt": ()}
_PROMPTS: dict[str, Any] = {"added": job_schema.PromptBatchOptions, "optional": ("model",)}
_ASYNC_LIMITS = {**_JOB["limited"], "n": {"const": 1}}

_COMPLETIONS = {
    "POST /v1/chat/completions": Operation(
        "Completions",
        "Answer a conversation, whole or as a stream of events.",
        (Answer(ChatCompletion), _stream(ChatCompletionChunk)),
        failures=_GENERATE,
        body=(Fields(ChatBody, CHAT_IGNORED),),
        headers=_URGENCY,
        answer_headers=_COMPLETION_HEADERS,
    ),
    "POST /v1/completions": Operation(
        "Completions",
        "Continue one or several prompts, whole or as a stream of events.",
        (Answer(TextCompletion), _stream(TextCompletionChunk)),
        failures=_GENERATE,
        body=(Fields(CompletionBody, COMPLETION_IGNORED),),
        headers=_URGENCY,
        answer_headers=_COMPLETION_HEADERS,
    ),
    "POST /v1/batch/sync": Operation(
        "Completions",
        "Continue many prompts, each as a request of its own; a prompt that cannot be served fails alone.",
        (
            Answer(job_answers.SyncPromptsReply),
            Answer(
                media_type="application/x-ndjson",
                events=(
                    job_answers.SyncProgress,
                    job_answers.PromptPart,
                    job_answers.PromptEnd,
                    job_answers.UnfinishedOutput,
                ),
            ),
        ),
        failures=_GENERATE,
        body=(
            Fields(
                CompletionBody,
                {**_PROMPTS_IGNORED, "callback_url": ()},
                "SyncPromptsBody",
                dropped=("prompt", "callback_url"),
                limited={"n": {"const": 1}},
                **_PROMPTS,
            ),
        ),
        query=job_schema.StreamQuery,
        headers=_URGENCY,
    ),
}

_REQUESTS = {
    "GET /v1/requests/{request_id}": Operation(
        "Completions",
        "Show a completion or line that runs, or that ended within the last hour, and where its time went.",
        _json(answers.RequestObject),
        failures=frozenset({404, 503}),
    ),
    "POST /v1/requests/{request_id}/cancel": Operation(
        "Completions",
        "Cancel a running completion; of an id that several of one tenant have, all.",
        _json(answers.RequestObject),
        failures=frozenset({404, 409, 503}),
    ),
}

_MODELS = {
    "GET /v1/models": Operation("Model", "List the served model.", _json(answers.ModelList), failures=frozenset({503})),
    "GET /v1/models/{model_id}": Operation(
        "Model", "Show the served model.", _json(answers.ModelObject), failures=frozenset({404, 503})
    ),
    "POST /tokenize": Operation(
        "Model",
        "Encode a prompt, or messages with the model's chat template.",
        _json(answers.TokenizeReply),
        failures=_READ_BODY | {404, 503},
        body=(Fields(TokenizeBody, TOKENIZE_IGNORED),),
    ),
    "POST /detokenize": Operation(
        "Model",
        "Return the text of token ids.",
        _json(answers.DetokenizeReply),
        failures=_READ_BODY | {404, 503},
        body=(Fields(DetokenizeBody, {}),),
    ),
    "GET /tokenizer_info": Operation(
        "Model", "Describe the tokenizer and the chat template.", _json(answers.TokenizerInfo), failures=frozenset()
    ),
}

_FILES = {
    "POST /v1/files": Operation(
        "Files",
        "Upload a file.",
        _json(job_answers.FileObject),
        failures=_READ_BODY | {503},
        body=Upload(job_schema.UploadForm),
        created=Created("/v1/files/{file_id}", "id"),
    ),
    "GET /v1/files": Operation(
        "Files",
        "List files.",
        _json(job_answers.FileList),
        failures=_FIND | {400},
        query=job_schema.FileListQuery,
    ),
    "GET /v1/files/{file_id}": Operation("Files", "Show a file.", _json(job_answers.FileObject), failures=_FIND),
    "DELETE /v1/files/{file_id}": Operation(
        "Files", "Delete a file.", _json(job_answers.DeletedFile), failures=_FIND | {409}
    ),
    "GET /v1/files/{file_id}/content": Operation(
        "Files",
        "Download a file.",
        (Answer(media_type="application/octet-stream"),),
        failures=_FIND,
    ),
}

_BATCHES = {
    "POST /v1/batches": Operation(
        "Batches",
        "Create a batch of the requests in an uploaded file.",
        _json(job_answers.BatchObject),
        failures=_SUBMIT,
        body=(Fields(job_schema.BatchBody, {}),),
        headers=_TRACE | {"idempotency-key"},
        created=Created("/v1/batches/{batch_id}", "id"),
    ),
    "GET /v1/batches": Operation(
        "Batches",
        "List batches, newest first.",
        _json(job_answers.BatchList),
        failures=_FIND | {400},
        query=job_schema.BatchListQuery,
    ),
    "GET /v1/batches/{batch_id}": Operation("Batches", "Show a batch.", _json(job_answers.BatchObject), failures=_FIND),
    "POST /v1/batches/{batch_id}/cancel": Operation(
        "Batches",
        "Cancel a batch and keep the results that it already has.",
        _json(job_answers.BatchObject),
        failures=_FIND | {409},
    ),
}

_JOBS = {
    "POST /v1/jobs": Operation(
        "Jobs",
        "Submit the body of a chat or text completion as a job, which runs later.",
        _json(job_answers.JobObject),
        status=202,
        failures=_SUBMIT,
        body=(
            Fields(ChatBody, CHAT_IGNORED, "ChatJobBody", **_JOB),
            Fields(CompletionBody, COMPLETION_IGNORED, "CompletionJobBody", **_JOB),
        ),
        headers=_URGENCY | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/v1/jobs/{job_id}", "id"),
    ),
    "GET /v1/jobs/{job_id}": Operation(
        "Jobs",
        "Show a job, at once or after its end.",
        _json(job_answers.JobObject),
        failures=_FIND | {400},
        query=job_schema.WaitQuery,
        answer_headers=_POLL_HEADERS,
    ),
    "DELETE /v1/jobs/{job_id}": Operation(
        "Jobs",
        "Cancel a job and keep its record.",
        _json(job_answers.JobObject),
        failures=_FIND | {409},
        answer_headers=_POLL_HEADERS,
    ),
    "POST /generate": Operation(
        "Jobs",
        "Submit a job in the short form: `model` may be left out, and `max_tokens` of a prompt is 50.",
        _json(job_answers.SubmittedJob),
        status=202,
        failures=_SUBMIT,
        body=(
            Fields(ChatBody, CHAT_IGNORED, "ShortChatJobBody", optional=("model",), **_JOB),
            Fields(CompletionBody, COMPLETION_IGNORED, "ShortCompletionJobBody", optional=("model",), **_JOB),
        ),
        headers=_URGENCY | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/status/{job_id}", "job_id"),
    ),
    "GET /status/{job_id}": Operation(
        "Jobs",
        "Show a job in the short form.",
        _json(job_answers.StatusObject),
        failures=_FIND | {400},
        query=job_schema.WaitQuery,
        answer_headers=_POLL_HEADERS,
    ),
}

_PROMPT_BATCHES = {
    "POST /v1/batch/async": Operation(
        "Prompt batches",
        "Submit many prompts, which run later.",
        _json(job_answers.SubmittedPromptBatch),
        status=202,
        failures=_SUBMIT,
        body=(
            Fields(
                CompletionBody,
                _PROMPTS_IGNORED,
                "PromptBatchBody",
                dropped=("prompt",),
                limited=_ASYNC_LIMITS,
                **_PROMPTS,
            ),
        ),
        headers=_URGENCY | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/v1/batch/{batch_id}", "batch_id"),
    ),
    "GET /v1/batch/stats": Operation(
        "Prompt batches",
        "Count batches and jobs by status.",
        _json(job_answers.PromptBatchStats),
        failures=frozenset({503}),
    ),
    "GET /v1/batch/{batch_id}": Operation(
        "Prompt batches",
        "Show the progress of a prompt batch and a page of its outputs.",
        _json(job_answers.PromptBatchPage),
        failures=_FIND | {400},
        query=job_schema.OutputsQuery,
    ),
    "POST /v1/batch/{batch_id}/cancel": Operation(
        "Prompt batches",
        "Cancel a prompt batch and keep the outputs that it already has.",
        _json(job_answers.PromptBatchObject),
        failures=_FIND | {409},
    ),
}

_USAGE = {
    "GET /v1/usage": Operation(
        "Usage",
        "Show tokens and computing time by day, tenant, model and band, as JSON or CSV.",
        (Answer(job_answers.UsageList), Answer(media_type="text/csv")),
        failures=frozenset({400, 403, 503}),
        query=job_schema.UsageListQuery,
        answer_headers=("x-headway-has-more",),
    ),
}

_OPERATIONS = {
    "GET /": Operation(
        "Server",
        "Say what this server is, as a page or as JSON.",
        (Answer(answers.Welcome), Answer(media_type="text/html")),
    ),
    "GET /docs": Operation("Server", "Show this description as a page.", (Answer(media_type="text/html"),)),
    "GET /openapi.json": Operation("Server", "Return this description.", _json(dict[str, Any])),
    "GET /version": Operation(
        "Server", "Return the versions of the server and its engine.", _json(answers.VersionReply)
    ),
    "GET /health": Operation(
        "Server",
        "Answer 200 if a request would be served now, with the state of the jobs.",
        _json(answers.HealthReply),
        failures=frozenset({503}),
    ),
    "GET /health/ready": Operation(
        "Server", "Answer 200 if a request would be served now.", _json(answers.ReadyReply), failures=frozenset({503})
    ),
    "GET /health/live": Operation(
        "Server",
        "Answer 200 if this process runs and no engine has stalled.",
        _json(answers.LiveReply),
        failures=frozenset({503}),
    ),
    "GET /metrics": Operation(
        "Server",
        "Return the metrics, in Prometheus's text format.",
        (Answer(media_type="text/plain"),),
        query=job_schema.EngineQuery,
        failures=frozenset({400}),
    ),
    "GET /dashboard": Operation(
        "Server", "Show the dashboard; with API keys it asks for an operator's.", (Answer(media_type="text/html"),)
    ),
    "GET /dashboard/dashboard.js": Operation(
        "Server", "Return the dashboard's script.", (Answer(media_type="text/javascript"),)
    ),
    "GET /dashboard/dashboard.css": Operation(
        "Server", "Return the dashboard's style.", (Answer(media_type="text/css"),)
    ),
    "GET /dashboard/events": Operation(
        "Server",
        "Send a snapshot of the server's state each second, for the dashboard and `headway top`.",
        (Answer(media_type="text/event-stream", events=(answers.DashboardSnapshot,)),),
        failures=frozenset({429}),
    ),
    "GET /load": Operation("Server", "Show the load of every replica.", _json(answers.LoadReply)),
    "POST /v1/replicas/{replica_id}/drain": Operation(
        "Server",
        "Have a replica take no more requests, hand its streams over, and be replaced.",
        _json(answers.DrainReply),
        failures=frozenset({404, 503}),
    ),
}

OPERATIONS: Mapping[str, Operation] = {
    **_COMPLETIONS,
    **_REQUESTS,
    **_JOBS,
    **_BATCHES,
    **_FILES,
    **_PROMPT_BATCHES,
    **_USAGE,
    **_MODELS,
    **_OPERATIONS,
}
"""Operations by method and path, in the order of the documentation."""
