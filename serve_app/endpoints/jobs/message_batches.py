"""Endpoints of Anthropic's Message Batches: /v1/messages/batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import InvalidRequest
from replicas.protocol import Band
from serve_app.endpoints.jobs.job_requests import JobRequests, Submitter
from serve_app.http.exchange import exchange_of, json_response, tenant_of
from serve_app.http.streaming import ByteStream
from serve_app.jobs.api.errors import BatchInProgress
from serve_app.jobs.api.new_lines import NewLine, NewLines, on_one_line
from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStatus,
    JobsService,
    LineRecord,
    LineStatus,
    NewBatch,
    PageRequest,
)
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.parsing import parse_body
from serve_app.protocols.messages.answers import MessageError
from serve_app.protocols.messages.batches import (
    MESSAGE_BATCH_LEVEL,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchBody,
    MessageBatchList,
    MessageBatchQuery,
    MessageBatchResult,
)
from serve_app.reference.operations import (
    LOOKUP_FAILURES,
    SUBMISSION_FAILURES,
    TRACE_HEADERS,
    Created,
    Fields,
    Operation,
)

_WINDOW_S = 86_400.0
"""Seconds after which a batch expires, as in Anthropic's API."""
_PAGE_LINES = 32
"""Results that are read at a time."""
_PATH = "/v1/messages/batches"
_BATCH_PATH = f"{_PATH}/{{message_batch_id}}"
_CONTENT_TYPE = "application/x-jsonl"
_ID = "message_batch_id"
_ANSWER_HEADERS = ("request-id",)


@dataclass(frozen=True, slots=True)
class MessageBatchMaker:
    """Factory of message batches; another process can do its work."""

    max_requests: int

    def batch(self, submitter: Submitter, fields: JsonObject) -> NewBatch:
        """Return the batch for a body.

        Raises:
            InvalidRequest: a field is wrong, a `custom_id` comes twice, or the requests are too many.
        """
        requests = fields.get("requests")
        if isinstance(requests, list) and len(requests) > self.max_requests:
            message = f"`requests` has {len(requests)} items; at most {self.max_requests} are accepted"
            raise InvalidRequest(message, "requests")
        body = parse_body(MessageBatchBody, fields, {})
        indexes: dict[str, int] = {}
        for index, one in enumerate(body.requests):
            first = indexes.setdefault(one.custom_id, index)
            if first != index:
                param = f"requests[{index}].custom_id"
                message = f"`{param}` is `{one.custom_id}`, as that of `requests[{first}]` is; it must be unique"
                raise InvalidRequest(message, param)
        principal = submitter.caller.principal
        return NewBatch(
            kind=BatchKind.MESSAGES,
            tenant=principal.tenant,
            endpoint="/v1/messages",
            band=Band.BATCH,
            band_ceiling=principal.band_ceiling,
            window_s=_WINDOW_S,
            lines=NewLines([NewLine(one.custom_id, one.params) for one in body.requests]),
            idempotency_key=submitter.idempotency_key,
            body_digest=submitter.digest(fields),
            request_id=submitter.request_id,
            trace=submitter.trace,
        )


class MessageBatchEndpoints:
    """Endpoints that create, list, show, cancel and delete message batches; a tenant sees only its own."""

    def __init__(self, requests: JobRequests) -> None:
        self._requests = requests
        self._client = requests.jobs.client
        self._maker = MessageBatchMaker(requests.jobs.settings.max_batch_lines)

    @Operation(
        "POST",
        _PATH,
        "Batches",
        MessageBatch,
        failures=SUBMISSION_FAILURES,
        bodies=(Fields(MessageBatchBody, {}),),
        headers=TRACE_HEADERS | {"idempotency-key"},
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
        created=Created(_BATCH_PATH),
    )
    async def create(self, request: Request) -> Response:
        """Create a batch of messages, which run within 24 hours.

        The batch is recorded durably before the answer.
        """
        new = await self._requests.read(request, self._maker.batch, MESSAGE_BATCH_LEVEL)
        batch = (await self._requests.submit(request, new)).batch
        exchange_of(request).details["num_requests"] = batch.counts.total
        return _shown(request, batch)

    @Operation(
        "GET",
        _PATH,
        "Batches",
        MessageBatchList,
        failures=LOOKUP_FAILURES | {400},
        query=MessageBatchQuery,
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
    )
    async def batches(self, request: Request) -> Response:
        """List message batches, newest first."""
        query = parse_body(MessageBatchQuery, request.query_params, {})
        if query.after_id is not None and query.before_id is not None:
            raise InvalidRequest("`after_id` and `before_id` exclude each other", "before_id")
        is_ascending = query.before_id is not None
        part = PageRequest(query.limit, query.before_id or query.after_id, is_ascending)
        page = await self._client.call(JobsService.batches, tenant_of(request), BatchKind.MESSAGES, part)
        items = [_object(request, batch) for batch in page.items]
        if is_ascending:
            items.reverse()
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return json_response({"data": items, "has_more": page.has_more, "first_id": first, "last_id": last})

    @Operation(
        "GET",
        _BATCH_PATH,
        "Batches",
        MessageBatch,
        failures=LOOKUP_FAILURES,
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
    )
    async def batch(self, request: Request) -> Response:
        """Show a message batch."""
        return _shown(request, await self._find(request))

    @Operation(
        "POST",
        f"{_BATCH_PATH}/cancel",
        "Batches",
        MessageBatch,
        failures=LOOKUP_FAILURES | {409},
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a message batch and keep the results that it already has."""
        batch = await self._find(request)
        return _shown(request, await self._client.call(JobsService.cancel, batch.tenant, batch.id))

    @Operation(
        "DELETE",
        _BATCH_PATH,
        "Batches",
        DeletedMessageBatch,
        failures=LOOKUP_FAILURES | {409},
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
    )
    async def delete(self, request: Request) -> Response:
        """Delete a message batch that has ended, with its results."""
        batch = await self._find(request)
        await self._client.call(JobsService.delete_batch, batch.tenant, batch.id)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    @Operation(
        "GET",
        f"{_BATCH_PATH}/results",
        "Batches",
        other_answers={_CONTENT_TYPE: (MessageBatchResult,)},
        failures=LOOKUP_FAILURES | {409},
        answer_headers=_ANSWER_HEADERS,
        error=MessageError,
    )
    async def results(self, request: Request) -> Response:
        """Stream the results of a message batch that has ended, a line for each request, in their order."""
        batch = await self._find(request)
        if not batch.status.is_final:
            raise BatchInProgress(f"`{batch.id}` is {batch.status.value}; it has results when it has ended")
        return ByteStream(self._lines(batch), exchange_of(request), _CONTENT_TYPE, {})

    async def _find(self, request: Request) -> BatchRecord:
        return await self._requests.find(request, BatchKind.MESSAGES, _ID)

    async def _lines(self, batch: BatchRecord) -> AsyncGenerator[bytes, None]:
        after = -1
        while after + 1 < batch.counts.total:
            page = await self._client.call(JobsService.lines, batch.tenant, batch.id, after, _PAGE_LINES)
            if not page:
                return
            after = page[-1].index
            yield b"".join(_result_line(line) for line in page)


def _shown(request: Request, batch: BatchRecord) -> Response:
    return json_response(_object(request, batch))


def _object(request: Request, batch: BatchRecord) -> JsonObject:
    assert batch.expires_unix_s is not None
    has_ended = batch.status.is_final
    is_canceling = batch.status is BatchStatus.CANCELLING
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if is_canceling else "in_progress",
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_unix_s),
        "expires_at": _time(batch.expires_unix_s),
        "ended_at": _time(batch.ended_unix_s),
        "cancel_initiated_at": _time(batch.cancelling_unix_s),
        "archived_at": None,
        "results_url": _results_url(request, batch.id) if has_ended else None,
    }


def _counts(batch: BatchRecord) -> JsonObject:
    counts = batch.counts
    if not batch.status.is_final:
        return {"processing": counts.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    return {
        "processing": 0,
        "succeeded": counts.completed,
        "errored": counts.failed - batch.num_undone,
        "canceled": batch.num_undone if batch.status is BatchStatus.CANCELLED else 0,
        "expired": batch.num_undone if batch.status is BatchStatus.EXPIRED else 0,
    }


def _time(unix_s: float | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _results_url(request: Request, batch_id: str) -> str:
    """Return the address of a batch's results, at the host and with the scheme that the client has used."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    scheme = forwarded if forwarded in ("http", "https") else request.url.scheme
    return str(request.base_url.replace(scheme=scheme, path=f"{_PATH}/{batch_id}/results"))


def _result_line(line: LineRecord) -> bytes:
    return on_one_line(to_json({"custom_id": line.custom_id, "result": _result(line)})) + b"\n"


def _result(line: LineRecord) -> JsonObject:
    match line.status:
        case LineStatus.SUCCEEDED:
            return {"type": "succeeded", "message": line.response}
        case LineStatus.FAILED:
            return {"type": "errored", "error": line.response}
        case LineStatus.EXPIRED:
            return {"type": "expired"}
        case _:
            return {"type": "canceled"}
