"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.auth import Authenticator
from serve_app.endpoints.bodies import BodyReader
from serve_app.endpoints.connection import while_connected
from serve_app.endpoints.event_stream import EventStream
from serve_app.endpoints.exchange import caller_of, exchange_of
from serve_app.endpoints.responses import Routes, json_response
from serve_app.endpoints.settings import IngressSettings
from serve_app.openai.neutral import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.service import CompletionService, Generation
from serve_app.openai.validation import Caller

_MIN_WAIT_S = 0.5
"""Shortest wait that a client's read time-out makes of a stream's, seconds: a stream of comments is work too."""


class CompletionEndpoints:
    """Chat and text completions, streamed or whole; when the client leaves, its sequences are aborted."""

    def __init__(
        self,
        settings: IngressSettings,
        authenticator: Authenticator,
        bodies: BodyReader,
        service: CompletionService,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._bodies = bodies
        self._service = service

    def routes(self) -> Routes:
        """Handlers by method and path."""
        return {
            "POST /v1/chat/completions": self.chat,
            "POST /v1/completions": self.completion,
        }

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        caller = caller_of(request, self._authenticator.authenticate(request.headers))
        body = await self._bodies.read(request, ChatBody, CHAT_NEUTRAL)
        generation = await while_connected(request.receive, self._service.chat(body, caller))
        return await self._respond(request, generation, caller)

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        caller = caller_of(request, self._authenticator.authenticate(request.headers))
        body = await self._bodies.read(request, CompletionBody, COMPLETION_NEUTRAL)
        generation = await while_connected(request.receive, self._service.completion(body, caller))
        return await self._respond(request, generation, caller)

    async def _respond(self, request: Request, generation: Generation, caller: Caller) -> Response:
        exchange = exchange_of(request)
        exchange.generation = generation
        exchange.headroom = partial(self._service.headroom, generation)
        if generation.body.stream:
            # Half the client's patience, so that something has arrived before it runs out.
            wait_s = max(_MIN_WAIT_S, (caller.hints.patience_s or float("inf")) / 2)
            header_wait_s = min(self._settings.max_header_wait_s, wait_s)
            keep_alive_s = min(self._settings.keep_alive_s, wait_s)
            return EventStream(self._service, generation, exchange, header_wait_s, keep_alive_s)
        reply = await while_connected(request.receive, self._service.answer(generation))
        replica_id = generation.progress.replica_id
        headers = {} if replica_id is None else {"x-model-replica": replica_id}
        return json_response(reply, headers=headers)
