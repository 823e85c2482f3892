"""Running of one line, tried again until it has ended."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from pydantic_core import to_json

from replicas.clock import Clock
from replicas.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestQuarantined, ServingError, UnknownModel
from replicas.protocol import Band
from serve_app.auth import Principal
from serve_app.errors import reply_to
from serve_app.jobs.lease_rows import LeasedLine, LineResult
from serve_app.jobs.line_checker import parse_line_body
from serve_app.jobs.queue_rows import Backlog, OpenBatch
from serve_app.jobs.records import LineStatus
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.service import CompletionService, Generation
from serve_app.openai.urgency import ClientHints
from serve_app.openai.validation import Caller

_Body = ChatBody | CompletionBody

logger = logging.getLogger(__name__)

_FINAL = (InvalidRequest, UnknownModel, RequestQuarantined)
"""Errors that trying again does not change."""
_MAX_FAILURES = 3
"""Of a kind that should not have happened, before the line is answered with it."""
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0
_MAX_RETRY_AFTER_S = 10.0
_LARGE_BODY_CHARS = 2**16
_DELTA_INTERVAL_S = 0.5
"""What is generated in this time is generated again where a replica dies."""


class Phase(Enum):
    """States of a line that is being run."""

    PREPARING = auto()
    SENT = auto()
    """In line for a replica, or on one."""
    BACKING_OFF = auto()


@dataclass(slots=True, eq=False)
class Run:
    """A line that is being run; one task owns it."""

    line: LeasedLine
    batch: OpenBatch
    band: Band
    phase: Phase = Phase.PREPARING


def backlog_of(runs: Iterable[Run]) -> list[Backlog]:
    """Lines that are being run as something that is to be done, by batch."""
    sums: dict[str, tuple[OpenBatch, int, int]] = {}
    for run in runs:
        batch, num_lines, tokens = sums.get(run.batch.id, (run.batch, 0, 0))
        sums[batch.id] = batch, num_lines + 1, tokens + run.line.expected_tokens
    return [Backlog(batch.band, batch.expires_unix_s, *its_sums) for batch, *its_sums in sums.values()]


class LineRunner:
    """Caller of the completion service that answers lines as the endpoints would.

    A retryable error, such as a full queue or a model without replicas, has no limit of attempts: the deadline of
    the batch ends the line.
    """

    def __init__(self, service: CompletionService, rng: random.Random, clock: Clock) -> None:
        self._service = service
        self._rng = rng
        self._clock = clock

    async def run(self, run: Run) -> LineResult:
        """The line's result; cancelling this aborts it."""
        try:
            return await self._answer_at_last(run, await _parse(run))
        except ServingError as error:
            return _failed(run.line, error)
        except Exception as error:
            logger.exception("a line failed", extra={"request_id": run.line.request_id})
            return _failed(run.line, error)

    async def _answer_at_last(self, run: Run, body: _Body) -> LineResult:
        """Try until the line is answered.

        Raises:
            ServingError: trying again does not help.
        """
        num_tries = num_failures = 0
        while True:
            try:
                return await self._answer(run, body)
            except ServingError as error:
                num_failures += not _is_passing(error)
                if isinstance(error, _FINAL) or num_failures >= _MAX_FAILURES or _is_too_late(error, body):
                    raise
                delay_s = self._delay_s(error, num_tries)
            num_tries += 1
            run.phase = Phase.BACKING_OFF
            await asyncio.sleep(delay_s)

    async def _answer(self, run: Run, body: _Body) -> LineResult:
        run.phase = Phase.PREPARING
        caller = self._caller(run)
        if isinstance(body, ChatBody):
            generation = await self._service.chat(body, caller)
        else:
            generation = await self._service.completion(body, caller)
        requests = tuple(replace(request, delta_interval_s=_DELTA_INTERVAL_S) for request in generation.requests)
        generation = replace(generation, requests=requests)
        run.phase = Phase.SENT
        reply = await self._service.answer(generation)
        return _succeeded(run.line, generation, to_json(reply).decode())

    def _caller(self, run: Run) -> Caller:
        """The batch's tenant, who may not be more urgent than the batch; the batch's deadline is the line's."""
        now = self._clock.unix()
        expires = run.batch.expires_unix_s
        return Caller(
            request_id=run.line.request_id,
            arrival_unix_s=now,
            principal=Principal(run.batch.tenant, run.band),
            hints=ClientHints(band=run.band, timeout_s=None if expires is None else max(0.001, expires - now)),
        )

    def _delay_s(self, error: ServingError, num_tries: int) -> float:
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_tries, 10)) * self._rng.uniform(0.5, 1.5)
        if isinstance(error, Overloaded):
            return max(delay_s, min(_MAX_RETRY_AFTER_S, error.retry_after_s))
        return delay_s


async def _parse(run: Run) -> _Body:
    endpoint, text = run.batch.endpoint, run.line.body
    if len(text) < _LARGE_BODY_CHARS:
        return parse_line_body(endpoint, text)
    return await asyncio.to_thread(parse_line_body, endpoint, text)


def _is_passing(error: ServingError) -> bool:
    """Whether an error says nothing of the line itself: a deadline may be the queue's own bound on waiting."""
    return error.retryable or isinstance(error, DeadlineExceeded)


def _is_too_late(error: ServingError, body: _Body) -> bool:
    """Whether a deadline of the line's own has passed; when its batch's has, the batch ends the line."""
    return isinstance(error, DeadlineExceeded) and body.deadline_ms is not None


def _succeeded(line: LeasedLine, generation: Generation, response: str) -> LineResult:
    progress = generation.progress
    return LineResult(
        line,
        LineStatus.SUCCEEDED,
        200,
        response,
        None,
        progress.prompt_tokens,
        progress.completion_tokens,
        progress.cached_tokens,
    )


def _failed(line: LeasedLine, error: Exception) -> LineResult:
    """The error as the endpoint would answer it, whole and its inner object alone."""
    reply = reply_to(error, line.request_id)
    return LineResult(
        line, LineStatus.FAILED, reply.status, to_json(reply.body).decode(), to_json(reply.body["error"]).decode()
    )
