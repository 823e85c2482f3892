"""Endpoints of OpenAI's /v1/batches: batches of requests in uploaded files."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from replicas.protocol import Band
from serve_app.auth import Authenticator
from serve_app.endpoints.batch_objects import batch_object, list_object
from serve_app.endpoints.submitter import Submitter
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import exchange_of
from serve_app.http.responses import Routes, json_response
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.records import BatchKind, NewBatch, PageRequest
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.job_schema import BatchBody, BatchListQuery
from serve_app.openai.request.parsing import parse_body


class BatchEndpoints:
    """Endpoints that create, list, show and cancel batches; a tenant sees only its own batches."""

    def __init__(self, authenticator: Authenticator, bodies: BodyReader, jobs: JobsAccess, model_name: str) -> None:
        self._authenticator = authenticator
        self._bodies = bodies
        self._jobs = jobs
        self._model_name = model_name

    def routes(self) -> Routes:
        """Return the handlers by method and path."""
        return {
            "POST /v1/batches": self.create,
            "GET /v1/batches": self.batches,
            "GET /v1/batches/{batch_id}": self.batch,
            "POST /v1/batches/{batch_id}/cancel": self.cancel,
        }

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/batches: create a batch, which validates its file later."""
        submitter = Submitter.of(request, self._authenticator)
        new = await self._bodies.convert(request, partial(_new_batch, submitter))
        if new.callback_url is not None:
            self._jobs.callbacks.refuse(new.callback_url)
        submission = await self._jobs.service.submit(new)
        exchange_of(request).details |= {"batch_id": submission.batch.id, "tenant": new.tenant}
        return json_response(batch_object(submission.batch, self._model_name))

    async def batches(self, request: Request) -> Response:
        """Answer GET /v1/batches, newest first."""
        tenant = self._tenant(request)
        query = parse_body(BatchListQuery, request.query_params, {})
        page = await self._jobs.service.batches(tenant, BatchKind.FILE, PageRequest(query.limit, query.after))
        return json_response(
            list_object([batch_object(batch, self._model_name) for batch in page.items], page.has_more)
        )

    async def batch(self, request: Request) -> Response:
        """Answer GET /v1/batches/{id}."""
        batch = await self._jobs.find(BatchKind.FILE, self._tenant(request), request.path_params["batch_id"])
        return json_response(batch_object(batch, self._model_name))

    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/batches/{id}/cancel: cancel a batch and keep the results that it already has."""
        tenant = self._tenant(request)
        batch = await self._jobs.find(BatchKind.FILE, tenant, request.path_params["batch_id"])
        return json_response(batch_object(await self._jobs.service.cancel(tenant, batch.id), self._model_name))

    def _tenant(self, request: Request) -> str:
        return self._authenticator.authenticate(request.headers).tenant


def _new_batch(submitter: Submitter, fields: JsonObject) -> NewBatch:
    body = parse_body(BatchBody, fields, {})
    expires_after = body.output_expires_after
    return NewBatch(
        kind=BatchKind.FILE,
        tenant=submitter.principal.tenant,
        endpoint=body.endpoint,
        band=Band.BATCH,
        band_ceiling=submitter.principal.band_ceiling,
        window_s=body.completion_window,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        callback_url=body.callback_url,
        idempotency_key=submitter.idempotency_key,
        body_digest=submitter.digest(fields),
        request_id=submitter.request_id,
        output_expires_after_s=None if expires_after is None else float(expires_after.seconds),
    )
