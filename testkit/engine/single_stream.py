"""Deltas of one request straight from an engine, for tests and benchmarks without channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.outbox import DeltaOutbox, FlushPolicy
from replicas.errors import as_serving_error
from replicas.protocol import GenerateRequest, TokenDelta


async def generate(engine: AsyncEngine, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one request. The last has an `error` if the request failed. Closing aborts the request."""
    outbox = DeltaOutbox()

    async def run() -> None:
        try:
            await engine.generate_into(request, outbox, 0)
        except Exception as error:
            outbox.open(0, FlushPolicy).fail(request.request_id, as_serving_error(error))

    running = asyncio.create_task(run())
    try:
        is_finished = False
        while not is_finished:
            for _, delta in await outbox.take():
                is_finished = delta.finish_reason is not None
                yield delta._replace(request_id=request.request_id, stats=engine.last_stats)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
