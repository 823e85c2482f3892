"""Endpoints POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.auth import Authenticator
from serve_app.http.bodies import BodyReader
from serve_app.http.connection import while_connected
from serve_app.http.event_stream import EventStream
from serve_app.http.exchange import caller_of, exchange_of
from serve_app.http.responses import Routes, json_response
from serve_app.http.settings import IngressSettings
from serve_app.openai.request.ignored_fields import CHAT_IGNORED, COMPLETION_IGNORED
from serve_app.openai.request.schema import ChatBody, CompletionBody
from serve_app.openai.request.validation import Caller
from serve_app.openai.service import CompletionService, PreparedCompletion

_MIN_WAIT_S = 0.5
"""Shortest interval of a stream's comments that a client's read time-out can set, seconds; comments cost work."""


class CompletionEndpoints:
    """Endpoints of chat and text completions, streamed or whole; a client's disconnect aborts its sequences."""

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
        """Return the handlers by method and path."""
        return {
            "POST /v1/chat/completions": self.chat,
            "POST /v1/completions": self.completion,
        }

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        caller = caller_of(request, self._authenticator.authenticate(request.headers))
        body = await self._bodies.read(request, ChatBody, CHAT_IGNORED)
        prepared = await while_connected(request.receive, self._service.chat(body, caller))
        return await self._respond(request, prepared, caller)

    async def completion(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        caller = caller_of(request, self._authenticator.authenticate(request.headers))
        body = await self._bodies.read(request, CompletionBody, COMPLETION_IGNORED)
        prepared = await while_connected(request.receive, self._service.completion(body, caller))
        return await self._respond(request, prepared, caller)

    async def _respond(self, request: Request, prepared: PreparedCompletion, caller: Caller) -> Response:
        exchange = exchange_of(request)
        exchange.prepared = prepared
        exchange.headroom = partial(self._service.headroom, prepared)
        if prepared.body.stream:
            # Half the client's read time-out, so that a byte arrives before the client gives up.
            wait_s = max(_MIN_WAIT_S, (caller.hints.sdk_timeout_s or float("inf")) / 2)
            header_wait_s = min(self._settings.max_header_wait_s, wait_s)
            keep_alive_s = min(self._settings.keep_alive_s, wait_s)
            return EventStream(self._service, prepared, exchange, header_wait_s, keep_alive_s)
        reply = await while_connected(request.receive, self._service.answer(prepared))
        replica_id = prepared.progress.replica_id
        headers = {} if replica_id is None else {"x-model-replica": replica_id}
        return json_response(reply, headers=headers)
