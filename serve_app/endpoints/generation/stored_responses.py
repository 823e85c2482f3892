"""Endpoints of stored responses: GET and DELETE /v1/responses/{response_id}, their cancellation and their items."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import InvalidRequest
from serve_app.endpoints.event_stream import CONTENT_TYPE, DONE, KEEP_ALIVE
from serve_app.endpoints.generation.item_pages import item_list, item_page_of
from serve_app.http.exchange import exchange_of, json_response, tenant_of
from serve_app.http.streaming import ByteStream
from serve_app.jobs.access import stored_id_of
from serve_app.jobs.api.responses import ResponseRecord, ResponsesService
from serve_app.jobs.response_client import StoredResponses
from serve_app.openai.reply.stored_run import StoredRun
from serve_app.openai.request.job_schema import ItemListQuery, ResponseQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.service import CompletionService
from serve_app.protocols.responses.answers import DeletedResponse, ResponseEvent, ResponseObject, StoredItemList
from serve_app.protocols.responses.stored import StoredEvents, response_object, restored
from serve_app.reference.operations import LOOKUP_FAILURES, Operation

_FAILURES = LOOKUP_FAILURES | {400}
_PATH = "/v1/responses/{response_id}"


class StoredResponseEndpoints:
    """Endpoints that show, follow, cancel and delete stored responses; a tenant sees only its own."""

    def __init__(self, stored: StoredResponses, service: CompletionService, keep_alive_s: float) -> None:
        """Create the endpoints; a stream without an event for `keep_alive_s` gets a comment."""
        self._stored = stored
        self._service = service
        self._keep_alive_s = keep_alive_s

    @Operation(
        "GET",
        _PATH,
        "Completions",
        ResponseObject,
        {"text/event-stream": (ResponseEvent, Literal["[DONE]"])},
        failures=_FAILURES,
        query=ResponseQuery,
    )
    async def show(self, request: Request) -> Response:
        """Show a stored response, or stream the events of one in the background from any of them on."""
        query = parse_body(ResponseQuery, request.query_params, {})
        response_id = stored_id_of(request.path_params["response_id"])
        if query.stream:
            return await self.follow(request, response_id, query.starting_after)
        return _shown(await self._stored.call(ResponsesService.response, tenant_of(request), response_id))

    @Operation("DELETE", _PATH, "Completions", DeletedResponse, failures=LOOKUP_FAILURES)
    async def delete(self, request: Request) -> Response:
        """Delete a stored response; one that runs in the background is stopped."""
        response_id = stored_id_of(request.path_params["response_id"])
        await self._stored.call(ResponsesService.delete_response, tenant_of(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @Operation("POST", f"{_PATH}/cancel", "Completions", ResponseObject, failures=_FAILURES)
    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background; one that has ended stays as it is."""
        response_id = stored_id_of(request.path_params["response_id"])
        return _shown(await self._stored.call(ResponsesService.cancel_response, tenant_of(request), response_id))

    @Operation("GET", f"{_PATH}/input_items", "Completions", StoredItemList, failures=_FAILURES, query=ItemListQuery)
    async def input_items(self, request: Request) -> Response:
        """List the items of a response's own input."""
        page, response_id = item_page_of(request), stored_id_of(request.path_params["response_id"])
        return item_list(
            await self._stored.call(ResponsesService.response_items, tenant_of(request), response_id, page)
        )

    async def follow(self, request: Request, response_id: str, starting_after: int) -> Response:
        """Return the stream of a response's events behind a sequence number, as they are committed.

        Raises:
            InvalidRequest: the response was not created with `background` and `stream`.
            UnknownResponse: it is not stored.
        """
        tenant = tenant_of(request)
        work = await self._stored.call(ResponsesService.response_run, tenant, response_id)
        run = None if work is None else StoredRun.of_json(work.plan)
        if run is None or not run.fields.get("stream"):
            message = f"response `{response_id}` was not created with `background` and `stream`; it cannot be streamed"
            raise InvalidRequest(message, "stream")
        events = StoredEvents(restored(self._service, await self._stored.content_key(), run), starting_after)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return ByteStream(self._parts(tenant, response_id, events), exchange_of(request), CONTENT_TYPE, headers)

    async def _parts(self, tenant: str, response_id: str, events: StoredEvents) -> AsyncGenerator[bytes, None]:
        yield events.opening()
        position = -1
        while True:
            progress = await self._stored.call(
                ResponsesService.follow_response, tenant, response_id, position, timeout_s=self._keep_alive_s
            )
            for delta in progress.deltas:
                position = delta.position
            parts = [events.add(delta.token_ids, delta.text, delta.finish) for delta in progress.deltas]
            if progress.record.status.is_final and not progress.has_more:
                yield b"".join(parts) + events.end(_object(progress.record)) + DONE
                return
            yield b"".join(parts) if progress.deltas else KEEP_ALIVE


def _object(record: ResponseRecord) -> dict[str, object]:
    return response_object(record.response, record.output, record.status.value)


def _shown(record: ResponseRecord) -> Response:
    return json_response(_object(record))
