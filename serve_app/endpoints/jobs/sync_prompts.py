"""Endpoint POST /v1/batch/sync: many prompts in one body, run concurrently and answered at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import InvalidRequest
from replicas.timing.clock import Clock
from serve_app.endpoints.jobs.job_objects import completed_output, unfinished_output
from serve_app.endpoints.jobs.new_batches import SYNC_PROMPTS_BODY, PromptBatchMaker, SyncPrompts
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import Exchange, caller_of, exchange_of, fail
from serve_app.http.settings import IngressSettings
from serve_app.http.streaming import ByteStream, while_connected
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.job_schema import StreamQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.service import CompletionService
from serve_app.reference.job_answers import PromptEnd, PromptPart, SyncProgress, SyncPromptsReply, UnfinishedOutput
from serve_app.reference.operations import COMPLETION_FAILURES, URGENCY_HEADERS, Access, Operation

_Arrived = asyncio.Queue[JsonObject | None]
"""Queue of events in order of arrival; None ends it."""


@dataclass(slots=True)
class PromptRun:
    """Run of one prompt batch; a failed prompt does not affect the others. Cancelling the run aborts every sequence."""

    service: CompletionService
    prompts: SyncPrompts
    caller: Caller
    exchange: Exchange
    clock: Clock
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    async def reply(self) -> bytes:
        """Run all prompts and return the whole reply as JSON."""
        outputs = await self.outputs()
        reply = self.progress("completed") | {"outputs": outputs}
        return await self.service.as_json(lambda: reply, self.caller)

    async def outputs(self) -> list[JsonObject]:
        """Run all prompts and return their outputs in order.

        Raises:
            ServingError: every prompt failed, each with a retryable error.
        """
        errors: list[Exception] = []

        async def output(index: int) -> JsonObject:
            try:
                prepared = await self._prepare(index)
                reply = await self.service.answer(prepared)
            except Exception as error:  # fails this prompt only
                errors.append(error)
                return self._failed(index, error)
            self._count(prepared)
            return completed_output(index, reply)

        outputs = await asyncio.gather(*map(output, range(len(self.prompts.bodies))))
        if len(errors) == len(outputs) and all(getattr(error, "retryable", False) for error in errors):
            raise errors[0]
        return outputs

    async def events(self, keep_alive_s: float) -> AsyncGenerator[JsonObject, None]:
        """Yield pieces of outputs on arrival, each with its prompt's index; after a silence yield the progress."""
        arrived: _Arrived = asyncio.Queue(maxsize=len(self.prompts.bodies))
        running = asyncio.create_task(self._follow_all(arrived))
        try:
            yield self.progress("processing")
            while (event := await self._next_within(arrived, keep_alive_s)) is not None:
                yield event
            yield self.progress("completed")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def progress(self, status: str) -> JsonObject:
        """Return the progress of the whole batch."""
        duration_s = max(self.clock.monotonic() - self.exchange.started_s, 1e-6)
        return {
            "batch_id": f"batch_sync_{self.caller.request_id}",
            "status": status,
            "num_prompts": len(self.prompts.bodies),
            "num_completed": self.num_completed,
            "num_failed": self.num_failed,
            "total_tokens": self.num_tokens,
            "latency_ms": round(duration_s * 1000, 3),
            "throughput_tokens_per_sec": round(self.num_tokens / duration_s, 3),
        }

    async def _next_within(self, arrived: _Arrived, limit_s: float) -> JsonObject | None:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await arrived.get()
        except TimeoutError:
            if not limit.expired():
                raise
            return self.progress("processing")

    async def _follow_all(self, arrived: _Arrived) -> None:
        await asyncio.gather(*(self._follow(index, arrived) for index in range(len(self.prompts.bodies))))
        await arrived.put(None)

    async def _follow(self, index: int, arrived: _Arrived) -> None:
        """Run one prompt; put the pieces of its completion into `arrived`, then its end."""
        try:
            prepared = await self._prepare(index)
            async with self.service.streams(prepared) as deltas:
                async for item in deltas:
                    prepared.progress.add(item)
                    for chunk in await self.service.chunks(prepared, item):
                        await arrived.put({**chunk["choices"][0], "index": index})
        except Exception as error:  # fails this prompt only
            await arrived.put(self._failed(index, error))
            return
        self._count(prepared)
        end: JsonObject = {"index": index, "status": "completed", "usage": prepared.progress.usage(), "error": None}
        if prepared.body.include_metrics:
            end["metrics"] = self.service.metrics(prepared)
        await arrived.put(end)

    async def _prepare(self, index: int) -> PreparedCompletion:
        body = self.prompts.bodies[index]
        if isinstance(body, InvalidRequest):
            raise body
        return await self.service.completion(body, replace(self.caller, request_id=f"{self.caller.request_id}-{index}"))

    def _count(self, prepared: PreparedCompletion) -> None:
        self.num_completed += 1
        num_tokens = prepared.progress.prompt_tokens + prepared.progress.completion_tokens
        self.num_tokens += num_tokens
        if self.exchange.key_use is not None:
            self.exchange.key_use.charge(num_tokens)

    def _failed(self, index: int, error: Exception) -> JsonObject:
        self.num_failed += 1
        reason = fail(self.exchange, error).body["error"]
        assert isinstance(reason, dict)
        return unfinished_output(index, "failed", reason)


class SyncPromptEndpoints:
    """Endpoint that runs prompt batches while the client waits; the client's disconnect aborts every sequence."""

    def __init__(self, bodies: BodyReader, service: CompletionService, settings: IngressSettings, clock: Clock) -> None:
        self._bodies = bodies
        self._service = service
        self._maker = PromptBatchMaker(service.checks, settings.served_model_name)
        self._settings = settings
        self._clock = clock

    @Operation(
        "POST",
        "/v1/batch/sync",
        "Completions",
        SyncPromptsReply,
        {"application/x-ndjson": (SyncProgress, PromptPart, PromptEnd, UnfinishedOutput)},
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(SYNC_PROMPTS_BODY,),
        query=StreamQuery,
        headers=URGENCY_HEADERS,
    )
    async def run(self, request: Request) -> Response:
        """Continue many prompts, each as a request of its own; a prompt that cannot be served fails alone.

        With `stream` the answer is lines of JSON, each with the `index` of its prompt.
        """
        exchange = exchange_of(request)
        caller = caller_of(request)
        query = parse_body(StreamQuery, request.query_params, {})
        make = partial(self._maker.sync, self._settings.limits.max_prompts)
        prompts = await self._bodies.convert(request, make, caller.owner_before_parsing)
        exchange.timeline.received(self._clock.monotonic())
        run = PromptRun(self._service, prompts, caller, exchange, self._clock)
        exchange.details |= {"num_prompts": len(prompts.bodies), "tenant": caller.principal.tenant}
        if query.stream or prompts.is_streamed:
            lines = _lines(run, self._settings.keep_alive_s)
            return ByteStream(lines, exchange, "application/x-ndjson", {"cache-control": "no-cache"})
        return Response(await while_connected(request.receive, run.reply()), media_type="application/json")


async def _lines(run: PromptRun, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events(keep_alive_s)) as events:
        async for event in events:
            yield to_json(event) + b"\n"
