"""Exchange of the use of API keys between ingresses, so that a key's limits hold for all of them together.

Once a second each ingress tells one model replica the running totals of the keys that it has lately served, and hears
the others' totals. An ingress keeps its side in `KeyLimiter`; the replica keeps a `KeyUseBoard`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from replicas.errors import ServingError
from serve_app.keys.rate_limits import MAX_PEER_AGE_S, KeyLimiter, KeyUseReport

EXCHANGE_PERIOD_S = 1.0
"""Seconds between two exchanges; bounds the use that other ingresses do not know of yet."""
_MAX_INGRESSES = 64
Exchange = Callable[[KeyUseReport], Awaitable[Sequence[KeyUseReport]]]
"""Call that publishes an ingress's report and returns those of the others; raises ServingError if none answers."""


class KeyUseBoard:
    """Board of a model replica with the last report of each ingress.

    Invariant: at most `_MAX_INGRESSES` reports, none older than `MAX_PEER_AGE_S`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._reports: dict[str, _Published] = {}

    def publish(self, report: KeyUseReport) -> tuple[KeyUseReport, ...]:
        """Keep the report of an ingress; return the last ones of the others."""
        now = self._clock()
        self._reports.pop(report.ingress_id, None)
        self._reports[report.ingress_id] = _Published(now, report)
        kept = [each for each in self._reports.values() if now - each.at_s <= MAX_PEER_AGE_S][-_MAX_INGRESSES:]
        self._reports = {each.report.ingress_id: each for each in kept}
        return tuple(each.report for each in kept if each.report.ingress_id != report.ingress_id)


@dataclass(frozen=True, slots=True)
class _Published:
    at_s: float
    report: KeyUseReport


class KeyUseExchange:
    """Loop of an ingress that exchanges its keys' use with the other ingresses.

    Without an answer each ingress goes on with what it knows: the buckets of the keys fill as always.
    """

    def __init__(self, limiter: KeyLimiter, ingress_id: str, exchange: Exchange) -> None:
        self._limiter = limiter
        self._ingress_id = ingress_id
        self._exchange = exchange
        self._num_reports = 0

    async def run(self) -> None:
        """Exchange until cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_PERIOD_S)
            await self.once()

    async def once(self) -> None:
        """Exchange now, if a replica answers."""
        self._num_reports += 1
        report = KeyUseReport.of(self._ingress_id, self._num_reports, self._limiter.totals())
        with contextlib.suppress(ServingError):
            self._limiter.take_in(await self._exchange(report))
