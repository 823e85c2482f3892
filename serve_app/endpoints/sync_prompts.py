"""POST /v1/batch/sync: many prompts in one body, answered at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from replicas.clock import Clock
from serve_app.auth import Authenticator
from serve_app.endpoints.bodies import BodyReader
from serve_app.endpoints.byte_stream import ByteStream
from serve_app.endpoints.connection import while_connected
from serve_app.endpoints.exchange import exchange_of
from serve_app.endpoints.new_prompts import PromptBatchMaker
from serve_app.endpoints.prompt_run import PromptRun
from serve_app.endpoints.responses import Routes, json_response
from serve_app.endpoints.settings import IngressSettings
from serve_app.openai.job_schema import StreamQuery
from serve_app.openai.parsing import parse_body
from serve_app.openai.urgency import hints_from
from serve_app.openai.validation import Caller


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
        caller = Caller(
            request_id=exchange.sequence_id,
            arrival_unix_s=exchange.arrival_unix_s,
            principal=self._authenticator.authenticate(request.headers),
            hints=hints_from(request.headers),
        )
        query = parse_body(StreamQuery, request.query_params, {})
        prompts = await self._bodies.convert(request, partial(self._maker.sync, self._settings.max_prompts))
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
