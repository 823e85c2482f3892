"""Endpoints of prompt batches that run later: /v1/batch/async, /v1/batch/{id} and /v1/batch/stats."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.jobs.job_objects import prompt_output, unix_second
from serve_app.endpoints.jobs.job_requests import JobRequests
from serve_app.endpoints.jobs.jobs import RETRY_AFTER_S
from serve_app.endpoints.jobs.new_batches import PROMPT_BATCH_BODY, PromptBatchMaker
from serve_app.http.exchange import caller_of, exchange_of, json_response, tenant_of
from serve_app.jobs.api.records import BatchKind, BatchRecord, BatchStatus, JobsService, LineRecord, LineStatus
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.job_schema import OutputsQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.service import CompletionService
from serve_app.reference.job_answers import PromptBatchObject, PromptBatchPage, PromptBatchStats, SubmittedPromptBatch
from serve_app.reference.operations import LOOKUP_FAILURES, SUBMISSION_FAILURES, URGENCY_HEADERS, Created, Operation


class PromptBatchEndpoints:
    """Endpoints that submit, show and cancel prompt batches; a tenant sees only its own batches."""

    def __init__(self, requests: JobRequests, maker: PromptBatchMaker, service: CompletionService) -> None:
        self._requests = requests
        self._jobs = requests.jobs
        self._maker = maker
        self._service = service

    @Operation(
        "POST",
        "/v1/batch/async",
        "Prompt batches",
        SubmittedPromptBatch,
        status=202,
        failures=SUBMISSION_FAILURES,
        bodies=(PROMPT_BATCH_BODY,),
        headers=URGENCY_HEADERS | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/v1/batch/{batch_id}", "batch_id"),
    )
    async def submit(self, request: Request) -> Response:
        """Submit many prompts, which run later.

        The batch is recorded durably before the answer.
        """
        new = await self._requests.read(request, partial(self._maker.batch, self._jobs.settings))
        batch = (await self._requests.submit(request, new)).batch
        exchange_of(request).details["num_prompts"] = batch.counts.total
        headers = {"location": f"/v1/batch/{batch.id}", "retry-after": str(RETRY_AFTER_S)}
        return json_response({"batch_id": batch.id, "status": _status_name(batch)}, 202, headers)

    @Operation("GET", "/v1/batch/stats", "Prompt batches", PromptBatchStats, failures=frozenset({503}))
    async def stats(self, request: Request) -> Response:
        """Count batches and jobs by status.

        It is declared before the path where `stats` would match as an id.
        """
        stats = await self._jobs.client.call(JobsService.stats, tenant_of(request))
        return json_response(
            {
                "total_batches": stats.total,
                "pending": stats.pending,
                "processing": stats.processing,
                "completed": stats.completed,
                "failed": stats.failed,
                "cancelled": stats.cancelled,
                "tokens_per_sec": round(stats.tokens_per_s, 3),
            }
        )

    @Operation(
        "GET",
        "/v1/batch/{batch_id}",
        "Prompt batches",
        PromptBatchPage,
        failures=LOOKUP_FAILURES | {400},
        query=OutputsQuery,
    )
    async def batch(self, request: Request) -> Response:
        """Show the progress of a prompt batch and a page of its outputs.

        Unfinished outputs are among them.
        """
        tenant = tenant_of(request)
        query = parse_body(OutputsQuery, request.query_params, {})
        batch = await self._jobs.find(BatchKind.PROMPTS, tenant, request.path_params["batch_id"])
        lines = await self._jobs.client.call(JobsService.lines, tenant, batch.id, query.after, query.limit)
        reply = await self._service.as_json(partial(_batch_with_outputs, batch, lines), caller_of(request))
        return Response(reply, media_type="application/json")

    @Operation(
        "POST", "/v1/batch/{batch_id}/cancel", "Prompt batches", PromptBatchObject, failures=LOOKUP_FAILURES | {409}
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a prompt batch and keep the outputs that it already has."""
        batch = await self._requests.find(request, BatchKind.PROMPTS)
        return json_response(_batch_object(await self._jobs.client.call(JobsService.cancel, batch.tenant, batch.id)))


def _status_name(batch: BatchRecord, has_started: bool = False) -> str:
    """Return a batch's status; `has_started`: one of its lines is known to have started."""
    has_started = has_started or batch.counts.completed + batch.counts.failed > 0
    if batch.status is BatchStatus.IN_PROGRESS and not has_started:
        return "pending"
    return batch.status.summary


def _batch_with_outputs(batch: BatchRecord, lines: list[LineRecord]) -> JsonObject:
    return _batch_object(batch) | {
        "status": _status_name(batch, has_started=any(line.status is not LineStatus.QUEUED for line in lines)),
        "outputs": [prompt_output(line) for line in lines],
        "has_more": bool(lines) and lines[-1].index + 1 < batch.counts.total,
    }


def _batch_object(batch: BatchRecord) -> JsonObject:
    counts = batch.counts
    num_done = counts.completed + counts.failed
    return {
        "batch_id": batch.id,
        "status": _status_name(batch),
        "progress": round(num_done / counts.total, 4) if counts.total else 0.0,
        "num_done": num_done,
        "request_counts": asdict(counts),
        "total_tokens": batch.num_prompt_tokens + batch.num_output_tokens,
        "eta_seconds": batch.eta_s,
        "created_at": int(batch.created_unix_s),
        "expires_at": unix_second(batch.expires_unix_s),
        "callback_url": batch.callback_url,
    }
