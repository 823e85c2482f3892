"""POST /v1/batch/sync: many prompts in one body, answered at once, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from replicas.clock import Clock
from replicas.errors import InvalidRequest
from serve_app.auth import Authenticator
from serve_app.endpoints.bodies import BodyReader
from serve_app.endpoints.byte_stream import ByteStream
from serve_app.endpoints.connection import while_connected
from serve_app.endpoints.exchange import Exchange, caller_of, exchange_of, fail
from serve_app.endpoints.job_objects import completed_output, unfinished_output
from serve_app.endpoints.new_prompts import PromptBatchMaker, SyncPrompts
from serve_app.endpoints.responses import Routes, json_response
from serve_app.endpoints.settings import IngressSettings
from serve_app.openai.job_schema import StreamQuery
from serve_app.openai.parsing import parse_body
from serve_app.openai.reply import JsonObject
from serve_app.openai.service import CompletionService, Generation
from serve_app.openai.validation import Caller

_Arrived = asyncio.Queue[JsonObject | None]
"""Events as they come; None: there are no more."""


@dataclass(slots=True)
class PromptRun:
    """One batch; a prompt that fails fails alone. Cancelling whoever runs it aborts every sequence."""

    service: CompletionService
    prompts: SyncPrompts
    caller: Caller
    exchange: Exchange
    clock: Clock
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    async def outputs(self) -> list[JsonObject]:
        """What came of each prompt, in order.

        Raises:
            ServingError: not one prompt was served, and trying again may help with all of them.
        """
        errors: list[Exception] = []

        async def output(index: int) -> JsonObject:
            try:
                generation = await self._generation(index)
                reply = await self.service.answer(generation)
            except Exception as error:  # whatever it is, the others go on
                errors.append(error)
                return self._failed(index, error)
            self._count(generation)
            return completed_output(index, reply)

        outputs = await asyncio.gather(*map(output, range(len(self.prompts.bodies))))
        if len(errors) == len(outputs) and all(getattr(error, "retryable", False) for error in errors):
            raise errors[0]
        return outputs

    async def events(self, keep_alive_s: float) -> AsyncGenerator[JsonObject, None]:
        """Pieces of outputs as they come, each with its prompt's index; silence is broken with the progress."""
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
        """The batch as a whole."""
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
        """The text of one prompt's completion piece by piece, then how it ended."""
        try:
            generation = await self._generation(index)
            async with self.service.start(generation) as deltas:
                async for item in deltas:
                    generation.progress.add(item)
                    for chunk in generation.format.chunk(item):
                        await arrived.put({**chunk["choices"][0], "index": index})
        except Exception as error:  # whatever it is, the others go on
            await arrived.put(self._failed(index, error))
            return
        self._count(generation)
        usage = generation.progress.usage()
        await arrived.put({"index": index, "status": "completed", "usage": usage, "error": None})

    async def _generation(self, index: int) -> Generation:
        body = self.prompts.bodies[index]
        if isinstance(body, InvalidRequest):
            raise body
        return await self.service.completion(body, replace(self.caller, request_id=f"{self.caller.request_id}-{index}"))

    def _count(self, generation: Generation) -> None:
        self.num_completed += 1
        self.num_tokens += generation.progress.prompt_tokens + generation.progress.completion_tokens

    def _failed(self, index: int, error: Exception) -> JsonObject:
        self.num_failed += 1
        reason = fail(self.exchange, error).body["error"]
        assert isinstance(reason, dict)
        return unfinished_output(index, "failed", reason)


class SyncPromptEndpoints:
    """Runs prompt batches while their client waits; when it leaves, every sequence is aborted."""

    def __init__(
        self,
        authenticator: Authenticator,
        bodies: BodyReader,
        maker: PromptBatchMaker,
        settings: IngressSettings,
        clock: Clock,
    ) -> None:
        self._authenticator = authenticator
        self._bodies = bodies
        self._maker = maker
        self._settings = settings
        self._clock = clock

    def routes(self) -> Routes:
        """Handlers by method and path."""
        return {"POST /v1/batch/sync": self.run}

    async def run(self, request: Request) -> Response:
        """POST /v1/batch/sync; with `stream`, as lines of JSON that tell their prompts by `index`."""
        exchange = exchange_of(request)
        caller = caller_of(request, self._authenticator.authenticate(request.headers))
        query = parse_body(StreamQuery, request.query_params, {})
        prompts = await self._bodies.convert(request, partial(self._maker.sync, self._settings.limits.max_prompts))
        run = PromptRun(self._maker.service, prompts, caller, exchange, self._clock)
        exchange.details |= {"num_prompts": len(prompts.bodies), "tenant": caller.principal.tenant}
        if query.stream or prompts.is_streamed:
            lines = _lines(run, self._settings.keep_alive_s)
            return ByteStream(lines, exchange, "application/x-ndjson", {"cache-control": "no-cache"})
        outputs = await while_connected(request.receive, run.outputs())
        return json_response(run.progress("completed") | {"outputs": outputs})


async def _lines(run: PromptRun, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events(keep_alive_s)) as events:
        async for event in events:
            yield to_json(event) + b"\n"
