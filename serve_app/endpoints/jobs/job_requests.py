"""Requests for asynchronous work: their sender, the work that they submit and the batch that they name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from replicas.errors import InvalidRequest
from replicas.protocol import Band
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of, tenant_of, trace_context_of
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.records import BatchKind, BatchRecord, JobsService, NewBatch, Submission, new_batch_id
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.caller import Caller, WorkOwner
from serve_app.openai.request.unknown_fields import CHAT_LEVEL, Level
from serve_app.tracing.context import TraceContext

ResultT = TypeVar("ResultT")

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Submitter:
    """Sender of a request for asynchronous work, and the headers that apply to the work."""

    caller: Caller
    request_id: str
    idempotency_key: str | None
    path: str
    trace: TraceContext | None

    @classmethod
    def of(cls, request: Request) -> Submitter:
        """Return the sender of `request`.

        Raises:
            InvalidRequest: a header has an invalid value.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise InvalidRequest(
                f"header `idempotency-key` has {len(key)} characters; it must be 1 to 255 printable ones, no spaces",
                "idempotency-key",
            )
        request_id, trace = exchange_of(request).request_id, trace_context_of(request)
        caller = replace(caller_of(request), timeline=None)  # Time is noted in this process only.
        return cls(caller, request_id, key, request.url.path, trace)

    def digest(self, fields: Mapping[str, object]) -> str | None:
        """Return a digest of path and body, to recognize a retry under one idempotency key; None: there is no key."""
        if self.idempotency_key is None:
            return None
        canonical = json.dumps([self.path, fields], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JobRequests:
    """Handler of the steps that the endpoints of files, batches and jobs have in common."""

    bodies: BodyReader
    jobs: JobsAccess

    async def read(
        self, request: Request, make: Callable[[Submitter, JsonObject], ResultT], level: Level = CHAT_LEVEL
    ) -> ResultT:
        """Return what `make` returns for the request's sender and body; `level` has the fields it knows.

        Raises:
            HttpError, InvalidRequest, RequestAborted, Overloaded, NoReplicaAvailable: as `BodyReader.convert`, or a
                field or header is invalid.
        """
        submitter = Submitter.of(request)
        owner = WorkOwner(Band.BATCH, submitter.caller.principal.tenant)
        return await self.bodies.convert(request, partial(make, submitter), owner, level)

    async def submit(self, request: Request, new: NewBatch, id_name: str = "batch_id") -> Submission:
        """Submit a batch, and log its id as `id_name`.

        Raises:
            InvalidRequest: the batch's `callback_url` is not accepted.
            ServingError: as `JobsService.submit`.
        """
        if new.callback_url is not None:
            self.jobs.callbacks.check(new.callback_url)
        submission = await self.jobs.client.call(JobsService.submit, new, new_batch_id(new.kind))
        exchange_of(request).details |= {id_name: submission.batch.id, "tenant": new.tenant}
        return submission

    async def find(self, request: Request, kind: BatchKind, id_name: str = "batch_id") -> BatchRecord:
        """Return the sender's batch that the parameter `id_name` of the request's path names.

        Raises:
            UnknownBatch: there is no such batch of this kind.
        """
        return await self.jobs.find(kind, tenant_of(request), request.path_params[id_name])
