"""Endpoints of what tenants have stored: GET /v1/stored, and DELETE /v1/stored/{tenant}."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.exchange import exchange_of, json_response
from serve_app.jobs.api.responses import ResponsesService, StoredSize
from serve_app.jobs.response_client import StoredResponses
from serve_app.reference.job_answers import StoredList, StoredObject
from serve_app.reference.operations import LOOKUP_FAILURES, Access, Operation


@dataclass(frozen=True, slots=True)
class StoredEndpoints:
    """Endpoints that show and delete the responses and conversations of tenants."""

    stored: StoredResponses
    max_bytes: int
    """Most bytes that a tenant may store."""

    @Operation("GET", "/v1/stored", "Server", StoredList, failures=LOOKUP_FAILURES)
    async def sizes(self, request: Request) -> Response:
        """Show how much is stored: of the key's own tenant; for an operator, of each tenant."""
        principal = exchange_of(request).principal
        tenant = None if principal.is_operator else principal.tenant
        sizes = await self.stored.call(ResponsesService.stored_by_tenant, tenant)
        data = [stored_object(tenant, size) for tenant, size in sizes.items()]
        return json_response({"object": "list", "data": data, "max_stored_bytes": self.max_bytes})

    @Operation(
        "DELETE", "/v1/stored/{tenant:path}", "Server", StoredObject, access=Access.OPERATOR, failures=LOOKUP_FAILURES
    )
    async def delete(self, request: Request) -> Response:
        """Delete all responses and conversations of a tenant; show what there was."""
        tenant = request.path_params["tenant"]
        return json_response(stored_object(tenant, await self.stored.call(ResponsesService.delete_stored, tenant)))


def stored_object(tenant: str, size: StoredSize) -> dict[str, object]:
    """Return the object of what a tenant has stored."""
    return {
        "tenant": tenant,
        "num_responses": size.num_responses,
        "num_conversations": size.num_conversations,
        "num_bytes": size.num_bytes,
        "oldest_response_at": None if size.oldest_unix_s is None else int(size.oldest_unix_s),
    }
