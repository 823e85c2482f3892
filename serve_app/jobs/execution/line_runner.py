"""Execution of one line, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from pydantic_core import from_json, to_json
from sqlalchemy import Connection

from replicas.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestQuarantined, ServingError, UnknownModel
from router.timeline import Timeline
from serve_app.errors import reply_to
from serve_app.jobs.api.errors import UnknownConversation, UnknownResponse
from serve_app.jobs.api.records import BatchKind, JobsSettings, LineStatus
from serve_app.jobs.api.responses import EndedResponse, ItemReference, NewResponse, ResponseEnd, ResponseStatus
from serve_app.jobs.execution.line_task import Attempt, LineRegistry, LineTask
from serve_app.jobs.storage.lines import LeasedLine, LineResult
from serve_app.jobs.storage.rows.batch_queue import Backlog, OpenBatch
from serve_app.jobs.storage.rows.responses import add_ended_response, conversation_before, find_items
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.keys.authenticator import Principal
from serve_app.monitoring.http import OutputMetrics
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.parsing import Converted, convert_fields, parse_body
from serve_app.openai.request.pooled_schema import POOLED_IGNORED, AnyBody, EmbeddingBody, RerankBody, ScoreBody
from serve_app.openai.request.schema import CHAT_IGNORED, COMPLETION_IGNORED, ChatBody, CompletionBody
from serve_app.openai.request.unknown_fields import CHAT_LEVEL, POOLED_LEVEL, Level
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.service import CompletionService
from serve_app.protocols.adapted_chat import AdaptedChat
from serve_app.protocols.messages.conversion import adapted_message
from serve_app.protocols.messages.schema import MESSAGES_LEVEL
from serve_app.protocols.responses.compaction import ContinuedRequest
from serve_app.protocols.responses.conversion import ResponseRequest
from serve_app.protocols.responses.encrypted_content import ContentCipher
from serve_app.protocols.responses.schema import RESPONSES_LEVEL, ResponsesBody
from serve_app.protocols.responses.stored import parsed_items, response_id_of, split_response, stored_items
from serve_app.tracing.request_spans import add_request
from serve_app.tracing.tracer import Moment, Trace, Tracer

_Body = ChatBody | CompletionBody | EmbeddingBody | ScoreBody | RerankBody | AdaptedChat | ResponseRequest

logger = logging.getLogger(__name__)

_FINAL = (InvalidRequest, UnknownModel, RequestQuarantined, UnknownResponse, UnknownConversation)
"""Errors that a retry does not change."""
_MAX_FAILURES = 3
"""Number of unexpected errors after which the line fails with the last one."""
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0
_MAX_RETRY_AFTER_S = 10.0
_LARGE_BODY_CHARS = 2**16
RESPONSES_PATH = "/v1/responses"

_ENDPOINTS: Mapping[str, tuple[Callable[[dict[str, object]], _Body], Level]] = {
    "/v1/chat/completions": (partial(parse_body, ChatBody, ignored=CHAT_IGNORED), CHAT_LEVEL),
    "/v1/completions": (partial(parse_body, CompletionBody, ignored=COMPLETION_IGNORED), CHAT_LEVEL),
    "/v1/embeddings": (partial(parse_body, EmbeddingBody, ignored=POOLED_IGNORED), POOLED_LEVEL),
    "/v1/score": (partial(parse_body, ScoreBody, ignored=POOLED_IGNORED), POOLED_LEVEL),
    "/v1/rerank": (partial(parse_body, RerankBody, ignored=POOLED_IGNORED), POOLED_LEVEL),
    "/v1/messages": (adapted_message, MESSAGES_LEVEL),
    RESPONSES_PATH: (ResponseRequest.of, RESPONSES_LEVEL),
}
"""Function that makes the body of each endpoint that batches may name, and the fields that it knows."""


class LineRunner:
    """Client of the completion service that answers lines as the endpoints do.

    Retryable errors, such as a full queue or a model without replicas, are retried without limit: only the deadline
    of the batch ends the line.
    """

    def __init__(
        self, service: CompletionService, metrics: OutputMetrics, rng: random.Random, context: JobsContext,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        """`tracer` None: nothing is traced."""
        self.service = service
        self._tracer = tracer
        self._database = context.database
        self._content_key = context.content_key
        self.lines = LineRegistry(context.clock)
        """Lines that run, and those that ended recently."""
        self._metrics = metrics
        self._rng = rng
        self._clock = context.clock

    async def run(self, line_task: LineTask) -> LineResult:
        """Run a line and return its result. A cancellation aborts the line's requests."""
        with self.lines.running(line_task):
            line_task.result = await self._run(line_task)
        return line_task.result

    async def _run(self, line_task: LineTask) -> LineResult:
        try:
            return await self._answer_at_last(line_task, await self._parse(line_task))
        except ServingError as error:
            return _failed(line_task.line, line_task.batch.endpoint, error)
        except Exception as error:
            logger.exception("a line failed", extra={"request_id": line_task.line.request_id})
            return _failed(line_task.line, line_task.batch.endpoint, error)

    async def _parse(self, line_task: LineTask) -> _Body:
        parse = partial(parse_line_body, line_task.batch.endpoint, self.service.checks.limits, line_task.line.body)
        is_large = len(line_task.line.body) >= _LARGE_BODY_CHARS
        parsed = await asyncio.to_thread(parse) if is_large else parse()
        line_task.ignored_fields = parsed.ignored_fields
        return parsed.value

    async def _answer_at_last(self, line_task: LineTask, body: _Body) -> LineResult:
        """Try until the line is answered.

        Raises:
            ServingError: a retry does not help.
        """
        num_tries = num_failures = 0
        while True:
            try:
                return await self._answer(line_task, body)
            except ServingError as error:
                num_failures += not _is_transient(error)
                if isinstance(error, _FINAL) or num_failures >= _MAX_FAILURES or _is_too_late(error, body):
                    raise
                delay_s = self._delay_s(error, num_tries)
            num_tries += 1
            line_task.is_sent = False
            await asyncio.sleep(delay_s)

    async def _answer(self, line_task: LineTask, body: _Body) -> LineResult:
        with self._attempt(line_task, body) as attempt:
            return await self._answer_once(line_task, body, attempt)

    async def _answer_once(self, line_task: LineTask, body: _Body, attempt: Attempt) -> LineResult:
        caller = self._caller(line_task, attempt.timeline)
        asked = body if isinstance(body, ResponseRequest) else None
        if asked is not None:
            asked = await self._with_items(asked, line_task.batch.tenant)
            body = await self._adapted(asked, line_task.batch.tenant)
        match body:
            case AdaptedChat():
                prepared = await body.prepare(self.service, caller)
            case ChatBody():
                prepared = await self.service.chat(body, caller)
            case CompletionBody():
                prepared = await self.service.completion(body, caller)
            case EmbeddingBody() | ScoreBody() | RerankBody():
                prepared = await self.service.pooled(body, caller)
        attempt.prepared = prepared
        line_task.is_sent = True
        reply = await self.service.answer(prepared)
        ignored = [f"ignored: {name}" for name in line_task.ignored_fields]
        if isinstance(body, AdaptedChat):
            ignored += [f"ignored tool: {name}" for name in body.ignored_tools]
        if ignored:
            reply["warnings"] = [*reply.get("warnings", ()), *ignored]
        self._metrics.count(
            num_not_enforced=len(prepared.not_enforced), num_malformed_calls=prepared.format.num_malformed_calls
        )
        self._metrics.chosen(prepared.body.n, prepared.longest_outputs)
        stored = None if asked is None or not asked.body.store else _stored(line_task, asked, prepared, reply)
        return _succeeded(line_task.line, prepared, to_json(reply).decode(), stored)

    async def _with_items(self, asked: ResponseRequest, tenant: str) -> ResponseRequest:
        """Return the request of a response with the stored items to which it refers.

        Raises:
            UnknownItem: one of them is not stored.
        """
        if not asked.referenced_ids:
            return asked
        references = [ItemReference(item_id, response_id_of(item_id)) for item_id in asked.referenced_ids]
        items = await self._database.read(lambda c: find_items(c, tenant, references))
        return asked.with_items(parsed_items(items))

    async def _adapted(self, asked: ResponseRequest, tenant: str) -> AdaptedChat:
        """Return the chat of a response, with the stored part of its conversation.

        Raises:
            InvalidRequest: the conversation cannot be served.
            UnknownResponse, UnknownConversation: it is not stored.
        """
        if asked.adapted is not None:
            return asked.adapted
        items = await self._database.read(lambda c: conversation_before(c, tenant, *_continued(asked)))
        continued = ContinuedRequest(asked, items, ContentCipher(self._content_key, tenant))
        is_large = continued.num_chars >= _LARGE_BODY_CHARS
        return await asyncio.to_thread(continued.adapted) if is_large else continued.adapted()

    @contextlib.contextmanager
    def _attempt(self, line_task: LineTask, body: _Body) -> Iterator[Attempt]:
        """Yield an attempt, and trace it when it ends."""
        start = Moment(self._clock.unix(), self._clock.monotonic())
        attempt = Attempt(
            start, Timeline(start.monotonic_s), _generation(body).model, self._begin_trace(line_task.batch, start)
        )
        attempt.timeline.received(start.monotonic_s)
        line_task.attempt = attempt
        try:
            yield attempt
        except ServingError as error:
            attempt.error_code = error.code
            raise
        except BaseException as error:
            attempt.error_code = "cancelled" if isinstance(error, asyncio.CancelledError) else ServingError.code
            raise
        finally:
            attempt.end(self._clock.monotonic())
            self._end_trace(line_task.line, attempt)

    def _begin_trace(self, batch: OpenBatch, start: Moment) -> Trace | None:
        if self._tracer is None:
            return None
        if batch.kind is BatchKind.JOB:
            return self._tracer.begin_work("job", batch.trace, start)
        return self._tracer.begin_linked_work("batch line", batch.trace, start)

    def _end_trace(self, line: LeasedLine, attempt: Attempt) -> None:
        if self._tracer is None or attempt.trace is None or not attempt.trace.is_recorded:
            return
        add_request(attempt.trace, attempt.timeline, attempt.prepared, self._tracer.has_prompts)
        names = {"headway.batch_id": line.batch_id, "headway.request_id": line.request_id}
        attempt.trace.end(self._clock.monotonic(), names, attempt.error_code)

    def _caller(self, line_task: LineTask, timeline: Timeline) -> Caller:
        """Return the batch's tenant as the caller, limited to the task's band, with the batch's deadline."""
        now = self._clock.unix()
        expires = line_task.batch.expires_unix_s
        return Caller(
            request_id=line_task.line.request_id,
            arrival_unix_s=now,
            principal=Principal(line_task.batch.tenant, line_task.band),
            requested_band=line_task.band,
            timeout_s=None if expires is None else max(0.001, expires - now),
            timeline=timeline,
        )

    def _delay_s(self, error: ServingError, num_tries: int) -> float:
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_tries, 10)) * self._rng.uniform(0.5, 1.5)
        if isinstance(error, Overloaded):
            return max(delay_s, min(_MAX_RETRY_AFTER_S, error.retry_after_s))
        return delay_s


def backlog_of(line_tasks: Iterable[LineTask]) -> list[Backlog]:
    """Return the work of lines that are being run, summed by batch."""
    sums: dict[str, tuple[OpenBatch, int, int]] = {}
    for line_task in line_tasks:
        batch, num_lines, tokens = sums.get(line_task.batch.id, (line_task.batch, 0, 0))
        sums[batch.id] = batch, num_lines + 1, tokens + line_task.line.expected_tokens
    return [Backlog(batch.band, batch.expires_unix_s, *its_sums) for batch, *its_sums in sums.values()]


def parse_line_body(endpoint: str, limits: RequestLimits, text: str) -> Converted[_Body]:
    """Parse the JSON of a line's body as its endpoint does.

    Raises:
        InvalidRequest: the endpoint would refuse it, or it asks for a stream.
    """
    make, level = _ENDPOINTS[endpoint]
    parsed = convert_fields(make, limits, from_json(text), level)
    if _generation(parsed.value).stream:
        raise InvalidRequest("`stream` is true; a batch cannot stream", "stream", "unsupported_parameter")
    if isinstance(parsed.value, ResponseRequest) and parsed.value.body.background:
        message = "`background` is true; the lines of a batch run without the client anyway"
        raise InvalidRequest(message, "background", "unsupported_parameter")
    if isinstance(parsed.value, ResponseRequest) and parsed.value.body.context_management:
        message = "`context_management` has an entry; the lines of a batch are not compacted"
        raise InvalidRequest(message, "context_management", "unsupported_parameter")
    return parsed


def _generation(body: _Body) -> AnyBody | ResponsesBody:
    match body:
        case AdaptedChat():
            return body.chat
        case ResponseRequest():
            return body.body
        case _:
            return body


def _is_transient(error: ServingError) -> bool:
    """Return True if an error does not depend on the line. A DeadlineExceeded may come from the queue's time limit."""
    return error.retryable or isinstance(error, DeadlineExceeded)


def _is_too_late(error: ServingError, body: _Body) -> bool:
    """Return True if the line's own deadline has passed. When the batch's has passed, the batch ends the line."""
    return isinstance(error, DeadlineExceeded) and _generation(body).deadline_ms is not None


def _stored(
    line_task: LineTask, asked: ResponseRequest, prepared: PreparedCompletion, reply: JsonObject
) -> EndedResponse:
    response, output = split_response(reply)
    items, ids = stored_items(asked.fields["input"], prepared.id), _continued(asked)
    new = NewResponse(prepared.id, line_task.batch.tenant, response, items, *ids)
    return EndedResponse(new, ResponseEnd(new.id, ResponseStatus(reply["status"]), response, output))


def _continued(asked: ResponseRequest) -> tuple[str | None, str | None]:
    """Return the ids of the response and of the conversation that a request continues."""
    return asked.body.previous_response_id, asked.conversation_id


def store_response(connection: Connection, result: LineResult, settings: JobsSettings, now: float) -> LineResult:
    """Store the response of a line's result, and return the result; a failure if it cannot be stored.

    Raises:
        IntegrityError: as `add_ended_response`.
    """
    assert result.stored is not None
    try:
        with connection.begin_nested():
            add_ended_response(connection, result.stored, settings, now)
    except ServingError as error:
        return _failed(result.line, RESPONSES_PATH, error)
    return result


def _succeeded(
    line: LeasedLine, prepared: PreparedCompletion, response: str, stored: EndedResponse | None
) -> LineResult:
    progress = prepared.progress
    return LineResult(
        line,
        LineStatus.SUCCEEDED,
        200,
        response,
        None,
        progress.prompt_tokens,
        progress.completion_tokens,
        progress.cached_tokens,
        stored,
    )


def _failed(line: LeasedLine, endpoint: str, error: Exception) -> LineResult:
    """Return a failed result: `response` is the endpoint's error body, `error` OpenAI's inner error object."""
    reply = reply_to(error, line.request_id)
    response = to_json(reply.body_at(endpoint, line.request_id)).decode()
    return LineResult(line, LineStatus.FAILED, reply.status, response, to_json(reply.body["error"]).decode())
