"""HTTP client that makes one attempt to deliver a webhook."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import httpx

from replicas.clock import Clock
from serve_app.jobs.webhooks.events import Delivery
from serve_app.jobs.webhooks.guard import WebhookGuard
from serve_app.jobs.webhooks.signing import WebhookSigner
from serve_app.jobs.webhooks.transport import PinnedTransport

_TIMEOUT_S = 15.0
_MAX_READ_BYTES = 2**16
_MAX_READ_S = 1.0
_HEADERS = {"content-type": "application/json", "user-agent": "Headway-Webhooks", "connection": "close"}


class DeliveryFailed(Exception):
    """Error for an attempt that the receiver did not confirm; the message gives the reason."""


class WebhookClient:
    """HTTP client that signs webhooks and posts them to addresses that the guard allows."""

    def __init__(
        self,
        signer: WebhookSigner,
        guard: WebhookGuard,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = _TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """`timeout_s`: most seconds of an attempt, from the name's resolution to the response status."""
        self._signer = signer
        self._timeout_s = timeout_s
        self._clock = clock or Clock()
        self._http = httpx.AsyncClient(
            transport=PinnedTransport(guard, tls), timeout=timeout_s, follow_redirects=False, trust_env=False
        )

    async def post(self, delivery: Delivery) -> None:
        """Post a delivery once. A status of 2xx means that the receiver has it.

        Raises:
            DeliveryFailed: another status (redirects included), no connection, or no answer in time.
        """
        headers = _HEADERS | self._signer.headers(delivery.id, delivery.body, self._clock.unix())
        try:
            request = self._http.build_request("POST", delivery.url, content=delivery.body.encode(), headers=headers)
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.send(request, stream=True)
        except TimeoutError as error:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
        await _finish(response)
        if not response.is_success:
            raise DeliveryFailed(f"status {response.status_code}")

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
                await _read_some(response)
    finally:
        await response.aclose()


async def _read_some(response: httpx.Response) -> None:
    num_bytes = 0
    async for part in response.aiter_raw():
        num_bytes += len(part)
        if num_bytes > _MAX_READ_BYTES:
            return
