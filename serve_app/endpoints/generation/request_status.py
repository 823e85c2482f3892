"""Endpoints of single completions: GET /v1/requests/{request_id} and POST /v1/requests/{request_id}/cancel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import HttpError, line_not_cancellable
from serve_app.http.exchange import exchange_of, json_response
from serve_app.http.request_registry import RequestRegistry
from serve_app.jobs.api.records import JobsClient, JobsService
from serve_app.keys.authenticator import Principal
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.prepared_completion import ID_PREFIXES
from serve_app.reference.answers import RequestObject
from serve_app.reference.operations import LOOKUP_FAILURES, Operation

_LINE_ID = re.compile(rf"({'|'.join(ID_PREFIXES)})?[0-9a-f]{{32}}-[0-9]+")
"""Form of the ids of lines and of their replies."""
_JOB_ID = re.compile(r"job_([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class RequestEndpoints:
    """Endpoints that show and cancel the completions of this ingress, and show lines of jobs and batches.

    A tenant sees its own, an operator all.
    """

    registry: RequestRegistry
    jobs: JobsClient | None

    @Operation("GET", "/v1/requests/{request_id}", "Completions", RequestObject, failures=LOOKUP_FAILURES)
    async def show(self, request: Request) -> Response:
        """Show a completion or line that runs, or that ended within the last hour, and where its time went."""
        request_id, principal = request.path_params["request_id"], exchange_of(request).principal
        try:
            return json_response(self.registry.find(request_id, principal))
        except HttpError:
            line = await self._line(request_id, principal)
            if line is None:
                raise
            return json_response(line)

    @Operation(
        "POST", "/v1/requests/{request_id}/cancel", "Completions", RequestObject, failures=LOOKUP_FAILURES | {409}
    )
    async def cancel(self, request: Request) -> Response:
        """Cancel a running completion; of an id that several of one tenant have, all.

        The completion ends with 499, or with an error event.
        """
        request_id, principal = request.path_params["request_id"], exchange_of(request).principal
        try:
            return json_response(self.registry.cancel(request_id, principal))
        except HttpError as error:
            if error.reply.status == 404 and await self._line(request_id, principal) is not None:
                raise line_not_cancellable(request_id) from None
            raise

    async def _line(self, request_id: str, principal: Principal) -> JsonObject | None:
        """Return the object of a line, named by its request id, by the id of its reply or by its job; None: no line.

        An id of another form asks nothing of the jobs process.
        """
        job = _JOB_ID.fullmatch(request_id)
        line_id = request_id if job is None else f"{job[1]}-0"
        if self.jobs is None or not _LINE_ID.fullmatch(line_id):
            return None
        tenant = None if principal.is_operator else principal.tenant
        return await self.jobs.call(JobsService.line_request, tenant, line_id)
