"""Endpoints of OpenAI's /v1/batches: batches of requests in uploaded files."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from replicas.protocol import Band
from serve_app.endpoints.jobs.job_objects import batch_object, list_object
from serve_app.endpoints.jobs.job_requests import JobRequests, Submitter
from serve_app.http.exchange import json_response, tenant_of
from serve_app.jobs.api.records import BatchKind, BatchRecord, JobsService, NewBatch, PageRequest
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.job_schema import BatchBody, BatchListQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.reference.job_answers import BatchList, BatchObject
from serve_app.reference.operations import (
    LOOKUP_FAILURES,
    SUBMISSION_FAILURES,
    TRACE_HEADERS,
    Created,
    Fields,
    Operation,
)


class BatchEndpoints:
    """Endpoints that create, list, show and cancel batches; a tenant sees only its own batches."""

    def __init__(self, requests: JobRequests, model_name: str) -> None:
        self._requests = requests
        self._client = requests.jobs.client
        self._model_name = model_name

    @Operation(
        "POST",
        "/v1/batches",
        "Batches",
        BatchObject,
        failures=SUBMISSION_FAILURES,
        bodies=(Fields(BatchBody, {}),),
        headers=TRACE_HEADERS | {"idempotency-key"},
        created=Created("/v1/batches/{batch_id}"),
    )
    async def create(self, request: Request) -> Response:
        """Create a batch of the requests in an uploaded file.

        The file is validated later.
        """
        new = await self._requests.read(request, _new_batch)
        return self._answer((await self._requests.submit(request, new)).batch)

    @Operation("GET", "/v1/batches", "Batches", BatchList, failures=LOOKUP_FAILURES | {400}, query=BatchListQuery)
    async def batches(self, request: Request) -> Response:
        """List batches, newest first."""
        tenant = tenant_of(request)
        query = parse_body(BatchListQuery, request.query_params, {})
        part = PageRequest(query.limit, query.after)
        page = await self._client.call(JobsService.batches, tenant, BatchKind.FILE, part)
        return json_response(
            list_object([batch_object(batch, self._model_name) for batch in page.items], page.has_more)
        )

    @Operation("GET", "/v1/batches/{batch_id}", "Batches", BatchObject, failures=LOOKUP_FAILURES)
    async def batch(self, request: Request) -> Response:
        """Show a batch."""
        return self._answer(await self._requests.find(request, BatchKind.FILE))

    @Operation("POST", "/v1/batches/{batch_id}/cancel", "Batches", BatchObject, failures=LOOKUP_FAILURES | {409})
    async def cancel(self, request: Request) -> Response:
        """Cancel a batch and keep the results that it already has."""
        batch = await self._requests.find(request, BatchKind.FILE)
        return self._answer(await self._client.call(JobsService.cancel, batch.tenant, batch.id))

    def _answer(self, batch: BatchRecord) -> Response:
        return json_response(batch_object(batch, self._model_name))


def _new_batch(submitter: Submitter, fields: JsonObject) -> NewBatch:
    body = parse_body(BatchBody, fields, {})
    expires_after = body.output_expires_after
    return NewBatch(
        kind=BatchKind.FILE,
        tenant=submitter.caller.principal.tenant,
        endpoint=body.endpoint,
        band=Band.BATCH,
        band_ceiling=submitter.caller.principal.band_ceiling,
        window_s=body.completion_window,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        callback_url=body.callback_url,
        idempotency_key=submitter.idempotency_key,
        body_digest=submitter.digest(fields),
        request_id=submitter.request_id,
        trace=submitter.trace,
        output_expires_after_s=None if expires_after is None else float(expires_after.seconds),
    )
