"""Retries of a request as the OpenAI SDKs make them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.benchmark.client import Client
from serve_app.benchmark.rows import Row

_MAX_ATTEMPTS = 3
_LONGEST_OBEYED_S = 120.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 8.0


@dataclass(frozen=True, slots=True)
class RetryingClient:
    """Client that retries a request until there is a stream or the SDK would give up."""

    client: Client
    rng: random.Random

    async def run(self, body: bytes, row: Row) -> None:
        """Send until there is an answer or no retry is left; fill in `row`, also when cancelled."""
        delay_s = await self._attempt(body, row)
        while delay_s is not None:
            await asyncio.sleep(delay_s)
            delay_s = await self._attempt(body, row)

    async def _attempt(self, body: bytes, row: Row) -> float | None:
        """Make one attempt; return the seconds until the next one, or None."""
        headers = await self.client.run(body, row)
        if row.status is not None and (row.status < 300 or (row.error_code or "").startswith("client:")):
            return None
        return retry_delay_s(row.status, headers, row.num_attempts, self.rng)


def retry_delay_s(
    status: int | None, headers: Mapping[str, str], num_attempts: int, rng: random.Random
) -> float | None:
    """Return the seconds until openai-python retries a request; None if it gives up.

    Retried are 408, 409, 429, every 5xx and failed connections (`status` None). `x-should-retry: true` makes any other
    status retried too; `false`, or a `Retry-After` above two minutes, forbids a retry. A shorter `Retry-After` is
    obeyed. Otherwise the wait doubles from half a second to eight, less a random part of up to a quarter.
    """
    if num_attempts >= _MAX_ATTEMPTS:
        return None
    asked_s = _retry_after_s(headers)
    if asked_s is not None and asked_s > _LONGEST_OBEYED_S:
        return None
    says = headers.get("x-should-retry")
    is_transient = status is None or status in (408, 409, 429) or status >= 500
    if says == "false" or (says != "true" and not is_transient):
        return None
    if asked_s is not None and asked_s > 0:
        return asked_s
    delay_s = min(_FIRST_DELAY_S * 2.0 ** (num_attempts - 1), _LONGEST_DELAY_S)
    return delay_s * (1 - 0.25 * rng.random())


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
    return None
