"""Prometheus metrics of the jobs deployment; ingresses serve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from replicas.protocol import Metric, MetricKind
from serve_app.jobs.api.records import BatchStatus, LineStatus
from serve_app.jobs.storage.batches import count_all_by_status
from serve_app.jobs.storage.database import Database
from serve_app.jobs.webhooks.sender import AttemptOutcome

_ENDED = (LineStatus.SUCCEEDED, LineStatus.FAILED, LineStatus.EXPIRED, LineStatus.CANCELLED)


class LineCounts:
    """Counter of the lines that this process has ended, by status."""

    def __init__(self) -> None:
        self._counts: Counter[LineStatus] = Counter()

    def add(self, status: LineStatus, number: int = 1) -> None:
        """Count `number` lines that ended with `status`."""
        self._counts[status] += number

    def __getitem__(self, status: LineStatus) -> int:
        return self._counts[status]


class JobsMetrics:
    """Reader of a jobs deployment's metrics. Every state and outcome is present from the start, at zero."""

    def __init__(
        self,
        database: Database,
        lines: LineCounts,
        eta_s: Callable[[], float],
        attempts: Callable[[], Mapping[AttemptOutcome, int]],
    ) -> None:
        """`eta_s`: gives seconds until all waiting lines are done; `attempts`: webhook deliveries by outcome."""
        self._database = database
        self._lines = lines
        self._eta_s = eta_s
        self._attempts = attempts

    async def read(self) -> tuple[Metric, ...]:
        """Return the current metrics."""
        batches = await self._database.read(count_all_by_status)
        return tuple(self._metrics(batches))

    def _metrics(self, batches: Mapping[BatchStatus, int]) -> Iterator[Metric]:
        for state in BatchStatus:
            yield _gauge("jobs", "Batches and jobs in the database.", batches.get(state, 0), state=state.value)
        for status in _ENDED:
            help_text = "Requests of batches and jobs that have ended since the jobs process started."
            yield _counter("batch_requests", help_text, self._lines[status], status=status.value)
        yield _gauge(
            "batch_eta_seconds",
            "Tokens expected of batch requests that wait / those of requests that ended in the last minute, by second; "
            "infinite where none ended.",
            self._eta_s(),
        )
        for outcome, number in self._attempts().items():
            help_text = "Attempts to deliver webhooks: delivered, failed (to be tried again) or dead (the last one)."
            yield _counter("webhook_deliveries", help_text, number, outcome=outcome.value)


def _gauge(name: str, help_text: str, value: float, **labels: str) -> Metric:
    return Metric(f"headway:{name}", help_text, MetricKind.GAUGE, value, tuple(labels.items()))


def _counter(name: str, help_text: str, value: float, **labels: str) -> Metric:
    return Metric(f"headway:{name}", help_text, MetricKind.COUNTER, value, tuple(labels.items()))
