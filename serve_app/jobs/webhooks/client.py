"""HTTP client that makes one attempt to deliver a webhook, at addresses that the guard checked."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import httpx

from replicas.timing.clock import Clock
from serve_app.jobs.webhooks.events import Delivery
from serve_app.jobs.webhooks.guard import AddressRefused, WebhookGuard
from serve_app.jobs.webhooks.signing import WebhookSigner
from serve_app.tracing.tracer import Moment, Trace, Tracer

_TIMEOUT_S = 15.0
_MAX_READ_BYTES = 2**16
_MAX_READ_S = 1.0
_HEADERS = {"content-type": "application/json", "user-agent": "Headway-Webhooks", "connection": "close"}


class DeliveryFailed(Exception):
    """Error for an attempt that the receiver did not confirm; the message gives the reason."""

    def __init__(self, message: str, has_answered: bool = False) -> None:
        """`has_answered`: the receiver gave another status; False: it gave none."""
        super().__init__(message, has_answered)
        self.has_answered = has_answered

    def __str__(self) -> str:
        return str(self.args[0])


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


class WebhookClient:
    """HTTP client that signs webhooks and posts them to addresses that the guard allows."""

    def __init__(
        self,
        signer: WebhookSigner,
        guard: WebhookGuard,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = _TIMEOUT_S,
        tracer: Tracer | None = None,
    ) -> None:
        """`timeout_s`: most seconds of an attempt, from the name's resolution to the response status.

        `tracer` None: the attempts are not traced.
        """
        self._tracer = tracer
        self._signer = signer
        self._timeout_s = timeout_s
        self._clock = Clock()
        self._http = httpx.AsyncClient(
            transport=PinnedTransport(guard, tls), timeout=timeout_s, follow_redirects=False, trust_env=False
        )

    async def post(self, delivery: Delivery) -> None:
        """Post a delivery once. A status of 2xx means that the receiver has it.

        Raises:
            DeliveryFailed: another status (redirects included), no connection, or no answer in time.
        """
        trace = self._begin_trace(delivery)
        error_type: str | None = "error"
        try:
            await self._post(delivery, trace)
            error_type = None
        except DeliveryFailed as error:
            error_type = str(error) if error.has_answered else "no_answer"
            raise
        finally:
            if trace is not None:
                attributes = {"headway.batch_id": delivery.batch_id, "headway.webhook.event": delivery.event}
                trace.end(self._clock.monotonic(), attributes, error_type)

    def _begin_trace(self, delivery: Delivery) -> Trace | None:
        if self._tracer is None or delivery.trace is None:
            return None
        now = Moment(self._clock.unix(), self._clock.monotonic())
        return self._tracer.begin_call("webhook", delivery.trace, now)

    async def _post(self, delivery: Delivery, trace: Trace | None) -> None:
        headers = _HEADERS | self._signer.headers(delivery.id, delivery.body, self._clock.unix())
        context = delivery.trace if trace is None else trace.context
        if context is not None:
            headers |= context.headers
        try:
            request = self._http.build_request("POST", delivery.url, content=delivery.body.encode(), headers=headers)
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.send(request, stream=True)
        except TimeoutError as error:
            raise DeliveryFailed(f"no answer within {self._timeout_s:.10g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
        await _finish(response)
        if not response.is_success:
            raise DeliveryFailed(f"status {response.status_code}", has_answered=True)

    async def close(self) -> None:
        """Close open connections."""
        await self._http.aclose()


async def _finish(response: httpx.Response) -> None:
    """Read the beginning of the response body, since some receivers take an early close for a disconnect.

    Errors are ignored: the status has already decided the outcome.
    """
    try:
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(_MAX_READ_S):
                num_bytes = 0
                async for part in response.aiter_raw():
                    num_bytes += len(part)
                    if num_bytes > _MAX_READ_BYTES:
                        return
    finally:
        await response.aclose()


def _pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """Return the request with an address instead of the host's name; its `Host` header keeps the name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )
