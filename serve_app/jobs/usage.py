"""Ledger of a process's usage, and its reports to the jobs process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from replicas.errors import ServingError
from replicas.timing.clock import Clock
from serve_app.jobs.api.usage import UsageKey, UsageReport, UsageRow, UsageSums
from serve_app.openai.reply.prepared_completion import PreparedCompletion

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 5.0
"""Seconds between two reports; a process that is killed loses at most the usage since its last one."""
_LAST_REPORT_LIMIT_S = 5.0
"""Longest time of the report of a process that stops, seconds."""
_MAX_KEYS = 10_000
OTHERS = "(others)"
"""Tenant of the usage beyond `_MAX_KEYS`."""


class UsageLedger:
    """Sums of usage that are not reported yet: implementation of `Meter`.

    While the jobs process does not answer, they wait here. At most `_MAX_KEYS` are kept apart; further tenants are
    added up as `OTHERS`, so nothing is lost.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums: dict[UsageKey, UsageSums] = {}

    def ended(self, prepared: PreparedCompletion) -> None:
        """Note a completion that was started and has ended, well or not."""
        first, work = prepared.requests[0], [timeline.work() for timeline in prepared.timelines]
        computed_tokens = sum(each.computed_tokens for each in work)
        is_answered = all(timeline.finished_s is not None for timeline in prepared.timelines)
        recomputed_tokens = sum(each.recomputed_tokens for each in work)
        self.add(
            UsageKey(self._today(), prepared.account, prepared.model, first.band),
            UsageSums(
                num_requests=1,
                prompt_tokens=prepared.progress.prompt_tokens,
                cached_tokens=prepared.progress.cached_tokens,
                output_tokens=sum(timeline.num_output_tokens for timeline in prepared.timelines),
                computed_tokens=computed_tokens,
                wasted_tokens=recomputed_tokens if is_answered else computed_tokens,
                device_s=sum(each.device_s for each in work),
            ),
        )

    def add(self, key: UsageKey, sums: UsageSums) -> None:
        """Add usage to the sums of its key."""
        if key not in self._sums and len(self._sums) >= _MAX_KEYS:
            key = UsageKey(key.day, OTHERS, key.model, key.band)
        self._sums.setdefault(key, UsageSums()).add(sums)

    def take(self) -> tuple[UsageRow, ...]:
        """Return the sums and forget them."""
        taken, self._sums = self._sums, {}
        return tuple(UsageRow(key, sums) for key, sums in taken.items())

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock.unix(), UTC).date().isoformat()


class UsageReporter:
    """Loop that reports a ledger's usage.

    A report is repeated, unchanged, until the jobs process has confirmed it. The jobs process counts each number of a
    reporter once, so that a lost answer does not count twice.

    Invariant: usage is in the ledger, in the report that waits, or confirmed.
    """

    def __init__(
        self, ledger: UsageLedger, report: Callable[[UsageReport], Awaitable[None]], period_s: float = REPORT_PERIOD_S
    ) -> None:
        """`report` sends one, as `JobsService.report_usage`."""
        self._ledger = ledger
        self._report = report
        self._period_s = period_s
        self._reporter_id = uuid.uuid4().hex
        self._num_reports = 0
        self._waiting: UsageReport | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.flush()

    async def flush(self) -> bool:
        """Report what there is; return False if it was not confirmed, and waits."""
        while self._waiting is not None or (rows := self._ledger.take()):
            if self._waiting is None:
                self._num_reports += 1
                self._waiting = UsageReport(self._reporter_id, self._num_reports, rows)
            try:
                await self._report(self._waiting)
            except ServingError as error:
                logger.warning("usage is not reported yet; it is kept", extra={"error": str(error)})
                return False
            self._waiting = None
        return True

    async def close(self) -> None:
        """Report for the last time, for a few seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REPORT_LIMIT_S):
                await self.flush()
