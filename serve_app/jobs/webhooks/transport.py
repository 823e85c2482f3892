"""Connects to the very addresses that were checked, so that a name that changes in between leads nowhere else."""

from __future__ import annotations

import ssl

import httpx

from serve_app.jobs.webhooks.guard import AddressRefused, WebhookGuard


class PinnedTransport(httpx.AsyncBaseTransport):
    """HTTP to addresses that a guard approved; the name stays in `Host`, and in TLS, which is verified for it.

    Every request has its host checked anew and a connection of its own: one that was made for another name on
    the same address has another name's certificate. Proxies of the environment are not used: they would resolve
    the name themselves.
    """

    def __init__(self, guard: WebhookGuard, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: whom to trust; None: the authorities that httpx comes with."""
        self._guard = guard
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(verify=tls or True, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response from the first of the host's addresses that can be connected to.

        Raises:
            httpx.ConnectError: none can, or the guard refuses the host.
        """
        host = request.url.raw_host.decode("ascii")
        port = request.url.port or {"http": 80, "https": 443}[request.url.scheme]
        try:
            addresses = await self._guard.addresses(host, port)
        except AddressRefused as error:
            raise httpx.ConnectError(str(error), request=request) from error
        failure: httpx.TransportError | None = None
        for address in addresses:
            try:
                return await self._inner.handle_async_request(_pinned(request, host, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def aclose(self) -> None:
        """Close what is open."""
        await self._inner.aclose()


def _pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """The request to an address instead of a name; its headers have the name already."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )
