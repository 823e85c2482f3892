"""HTTP transport that connects only to the addresses that the guard checked; this prevents DNS rebinding."""

from __future__ import annotations

import ssl

import httpx

from serve_app.jobs.webhooks.guard import AddressRefused, WebhookGuard


class PinnedTransport(httpx.AsyncBaseTransport):
    """HTTP transport to addresses that a guard approved. The `Host` header and TLS verification keep the name.

    The host is checked again at every request. Connections are not reused: one that was opened for another name on
    the same address was verified for that name's certificate. Proxies from the environment are ignored, since they
    would resolve the name themselves.
    """

    def __init__(self, guard: WebhookGuard, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: TLS context with the trusted authorities; None: httpx's default."""
        self._guard = guard
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(verify=tls or True, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response from the first of the host's addresses that accepts a connection.

        Raises:
            httpx.ConnectError: no address accepts one, or the guard refuses the host.
            httpx.ConnectTimeout: the last address did not answer in time.
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
        """Close open connections."""
        await self._inner.aclose()


def _pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """Return the request with an address instead of the host's name; its `Host` header keeps the name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )
