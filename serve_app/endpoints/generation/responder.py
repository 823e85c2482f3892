"""Answers of completions, whole or as streams, whatever the protocol of the request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.event_stream import EventStream
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import ReplyRecord, caller_of, exchange_of
from serve_app.http.request_registry import RequestRegistry
from serve_app.http.settings import IngressSettings
from serve_app.http.streaming import while_connected
from serve_app.openai.reply.format import json_in_pieces
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.pooled_schema import AnyBody
from serve_app.openai.request.unknown_fields import Level
from serve_app.openai.service import CompletionService
from serve_app.protocols.adapted_chat import AdaptedChat

_MIN_WAIT_S = 0.5
"""Shortest interval of a stream's comments that a client's read time-out can set, seconds; comments cost work."""

MakeRecord = Callable[[PreparedCompletion], ReplyRecord]


class Completions:
    """Completions that clients wait for; a client's disconnect aborts its sequences."""

    def __init__(self, settings: IngressSettings, service: CompletionService, registry: RequestRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self.service = service

    async def respond_to_chat(
        self, request: Request, bodies: BodyReader, make: Callable[[dict[str, object]], AdaptedChat], level: Level
    ) -> Response:
        """Return the response to a body of another protocol, which `make` adapts; `level` has the fields it knows."""
        adapted = await bodies.convert(request, make, caller_of(request).owner_before_parsing, level)
        return await self.respond_to_adapted(request, adapted)

    async def respond_to_adapted(
        self, request: Request, adapted: AdaptedChat, record: MakeRecord | None = None
    ) -> Response:
        """Return the response to an adapted chat; `record` is as in `respond`."""
        caller = caller_of(request)
        exchange_of(request).ignored_tools = adapted.ignored_tools
        return await self.respond(request, caller, adapted.chat, adapted.prepare(self.service, caller), record)

    async def respond(
        self,
        request: Request,
        caller: Caller,
        body: AnyBody,
        preparing: Coroutine[Any, Any, PreparedCompletion],
        record: MakeRecord | None = None,
    ) -> Response:
        """Return the response to a body whose completion `preparing` makes ready.

        `record` makes the record of a reply that is stored; None: it is not.

        Raises:
            ServingError: the completion failed before its response began.
        """
        exchange = exchange_of(request)
        self._registry.begin(exchange, body, caller.owner_of(body))
        async with exchange.cancellation.within():
            exchange.prepared = prepared = await while_connected(request.receive, preparing)
        exchange.headroom = partial(self.service.headroom, prepared)
        if exchange.key_use is not None:
            exchange.key_use.charge(prepared.progress.prompt_tokens)
        exchange.record = None if record is None else record(prepared)
        return await self._answer(request, caller, prepared)

    async def _answer(self, request: Request, caller: Caller, prepared: PreparedCompletion) -> Response:
        exchange = exchange_of(request)
        if prepared.body.stream:
            # Half the client's read time-out, so that a byte arrives before the client gives up.
            wait_s = max(_MIN_WAIT_S, (caller.sdk_timeout_s or float("inf")) / 2)
            header_wait_s = min(self._settings.max_header_wait_s, wait_s)
            keep_alive_s = min(self._settings.keep_alive_s, wait_s)
            return EventStream(self.service, prepared, exchange, header_wait_s, keep_alive_s)
        async with exchange.cancellation.within():
            reply = await while_connected(request.receive, self._whole(prepared, exchange.record))
        replica_id = prepared.progress.replica_id
        headers = {} if replica_id is None else {"x-model-replica": replica_id}
        return Response(reply, headers=headers, media_type="application/json")

    async def _whole(self, prepared: PreparedCompletion, record: ReplyRecord | None) -> bytes:
        """Return the whole reply as JSON, once it is stored if it has a record."""
        if record is None:
            return await self.service.answer_json(prepared)
        try:
            reply = await self.service.answer(prepared)
            await record.begun()
            await record.ended(reply)
        finally:
            record.left()
        return json_in_pieces(reply)
