"""Endpoints of single completions: GET /v1/requests/{request_id} and POST /v1/requests/{request_id}/cancel."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serve_app.http.exchange import Routes, exchange_of, json_response
from serve_app.http.request_registry import RequestRegistry


@dataclass(frozen=True, slots=True)
class RequestEndpoints:
    """Endpoints that show and cancel the completions of this ingress; a tenant sees its own, an operator all."""

    registry: RequestRegistry

    def routes(self) -> Routes:
        """Return the handlers by method and path."""
        return {"GET /v1/requests/{request_id}": self.show, "POST /v1/requests/{request_id}/cancel": self.cancel}

    async def show(self, request: Request) -> Response:
        """Answer GET /v1/requests/{request_id}: a completion that runs or ended recently."""
        return json_response(self.registry.find(request.path_params["request_id"], exchange_of(request).principal))

    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/requests/{request_id}/cancel: the completion ends with 499, or with an error event."""
        return json_response(self.registry.cancel(request.path_params["request_id"], exchange_of(request).principal))
