"""Endpoints of jobs, requests that are accepted at once and run later: /v1/jobs, /generate and /status."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import ServingError
from serve_app.endpoints.jobs.job_objects import job_object, job_status, status_object
from serve_app.endpoints.jobs.job_requests import JobRequests, Submitter
from serve_app.endpoints.jobs.new_batches import JOB_BODIES, SHORT_JOB_BODIES, JobMaker, NewJob
from serve_app.http.exchange import caller_of, json_response, tenant_of
from serve_app.http.streaming import while_connected
from serve_app.jobs.api.records import BatchKind, BatchRecord, JobsService, LineRecord, Submission
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.job_schema import WaitQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.pooled_schema import EmbeddingBody, RerankBody, ScoreBody
from serve_app.openai.request.schema import ChatBody, CompletionBody
from serve_app.openai.request.unknown_fields import JOB_LEVEL
from serve_app.openai.service import CompletionService
from serve_app.reference.job_answers import JobObject, StatusObject, SubmittedJob
from serve_app.reference.operations import LOOKUP_FAILURES, SUBMISSION_FAILURES, URGENCY_HEADERS, Created, Operation

RETRY_AFTER_S = 1
"""Poll interval advised to clients in `retry-after`, seconds."""


class JobEndpoints:
    """Endpoints that submit, poll, await and cancel jobs; a tenant sees only its own jobs."""

    def __init__(self, requests: JobRequests, maker: JobMaker, service: CompletionService) -> None:
        self._requests = requests
        self._maker = maker
        self._service = service

    @Operation(
        "POST",
        "/v1/jobs",
        "Jobs",
        JobObject,
        status=202,
        failures=SUBMISSION_FAILURES,
        bodies=JOB_BODIES,
        headers=URGENCY_HEADERS | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/v1/jobs/{job_id}"),
    )
    async def submit(self, request: Request) -> Response:
        """Submit the body of a completion, embeddings, scores or ranks as a job, which runs later.

        The job is recorded durably before the answer.
        """
        submission = await self._submit(request, self._maker.job)
        job = submission.batch
        return _accepted(job_object(job, await self._line_known(submission)), f"/v1/jobs/{job.id}")

    @Operation(
        "POST",
        "/generate",
        "Jobs",
        SubmittedJob,
        status=202,
        failures=SUBMISSION_FAILURES,
        bodies=SHORT_JOB_BODIES,
        headers=URGENCY_HEADERS | {"idempotency-key"},
        answer_headers=("location", "retry-after"),
        created=Created("/status/{job_id}", "job_id"),
    )
    async def generate(self, request: Request) -> Response:
        """Submit a job in the short form: `model` may be left out, and `max_tokens` of a prompt is 50."""
        submission = await self._submit(request, self._maker.short_job)
        job = submission.batch
        status = job_status(job, await self._line_known(submission))
        return _accepted({"job_id": job.id, "status": status}, f"/status/{job.id}")

    @Operation(
        "GET",
        "/v1/jobs/{job_id}",
        "Jobs",
        JobObject,
        failures=LOOKUP_FAILURES | {400},
        query=WaitQuery,
        answer_headers=("retry-after",),
    )
    async def job(self, request: Request) -> Response:
        """Show a job, at once or after its end.

        It waits for the end, at most `wait` seconds.
        """
        job = await self._waited_for(request)
        return _polled(job, job_object(job, await self._line(job)))

    @Operation(
        "GET",
        "/status/{job_id}",
        "Jobs",
        StatusObject,
        failures=LOOKUP_FAILURES | {400},
        query=WaitQuery,
        answer_headers=("retry-after",),
    )
    async def status(self, request: Request) -> Response:
        """Show a job in the short form."""
        job = await self._waited_for(request)
        return _polled(job, status_object(job, await self._line(job)))

    @Operation(
        "DELETE",
        "/v1/jobs/{job_id}",
        "Jobs",
        JobObject,
        failures=LOOKUP_FAILURES | {409},
        answer_headers=("retry-after",),
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a job and keep its record."""
        job = await self._requests.find(request, BatchKind.JOB, "job_id")
        job = await self._requests.jobs.client.call(JobsService.cancel, job.tenant, job.id)
        return _polled(job, job_object(job, await self._line(job)))

    async def _submit(self, request: Request, make: Callable[[Submitter, JsonObject], NewJob]) -> Submission:
        new = await self._requests.read(request, make, JOB_LEVEL)
        await self._check(new, caller_of(request))
        return await self._requests.submit(request, new.batch, "job_id")

    async def _check(self, job: NewJob, caller: Caller) -> None:
        """Check what only tokenizing finds. While no replica answers nothing is checked, and an error fails the job.

        Raises:
            InvalidRequest: the job cannot be served, as when it exceeds the model's context.
        """
        try:
            match job.body:
                case ChatBody():
                    await self._service.chat(job.body, caller)
                case CompletionBody():
                    await self._service.completion(job.body, caller)
                case EmbeddingBody() | ScoreBody() | RerankBody():
                    await self._service.pooled(job.body, caller)
        except ServingError as error:
            if not error.retryable:
                raise

    async def _waited_for(self, request: Request) -> BatchRecord:
        tenant = tenant_of(request)
        query = parse_body(WaitQuery, request.query_params, {})
        job = await self._requests.jobs.find(BatchKind.JOB, tenant, request.path_params["job_id"])
        if job.status.is_final or not query.wait:
            return job
        return await while_connected(
            request.receive, self._requests.jobs.client.call(JobsService.wait, tenant, job.id, query.wait)
        )

    async def _line_known(self, submission: Submission) -> LineRecord | None:
        """Return the line of a job that was submitted before; None for a new job, whose line is still queued."""
        return None if submission.is_new else await self._line(submission.batch)

    async def _line(self, job: BatchRecord) -> LineRecord | None:
        lines = await self._requests.jobs.client.call(JobsService.lines, job.tenant, job.id, after_index=-1, limit=1)
        return lines[0] if lines else None


def _accepted(value: JsonObject, location: str) -> Response:
    return json_response(value, 202, {"location": location, "retry-after": str(RETRY_AFTER_S)})


def _polled(job: BatchRecord, value: JsonObject) -> Response:
    return json_response(value, headers={} if job.status.is_final else {"retry-after": str(RETRY_AFTER_S)})
