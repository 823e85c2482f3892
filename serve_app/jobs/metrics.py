"""Prometheus metrics of the jobs deployment; ingresses serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from replicas.protocol import Metric, MetricKind
from serve_app.jobs.api.records import BatchStatus, LineStatus
from serve_app.jobs.webhooks.sender import AttemptOutcome

_ENDED = (LineStatus.SUCCEEDED, LineStatus.FAILED, LineStatus.EXPIRED, LineStatus.CANCELLED)


def jobs_metrics(
    batches: Mapping[BatchStatus, int],
    ended_lines: Mapping[LineStatus, int],
    eta_s: float,
    attempts: Mapping[AttemptOutcome, int],
) -> Iterator[Metric]:
    """Yield the metrics. Every state and outcome is present from the start, at zero.

    `eta_s`: seconds until all waiting lines are done; `attempts`: webhook deliveries by outcome.
    """
    for state in BatchStatus:
        yield _metric("jobs", "Batches and jobs in the database.", batches.get(state, 0), state=state.value)
    for status in _ENDED:
        help_text = "Requests of batches and jobs that have ended since the jobs process started."
        yield _metric("batch_requests", help_text, ended_lines.get(status, 0), MetricKind.COUNTER, status=status.value)
    yield _metric(
        "batch_eta_seconds",
        "Tokens expected of batch requests that wait / those of requests that ended in the last minute, by second; "
        "infinite where none ended.",
        eta_s,
    )
    for outcome, number in attempts.items():
        help_text = "Attempts to deliver webhooks: delivered, failed (to be tried again) or dead (the last one)."
        yield _metric("webhook_deliveries", help_text, number, MetricKind.COUNTER, outcome=outcome.value)


def storage_metric(is_up: bool) -> Metric:
    """Return the metric of the storage."""
    help_text = "1 while the database of jobs can be used, 0 from a failure to the next write that succeeds."
    return _metric("jobs_storage_up", help_text, float(is_up))


def _metric(name: str, help_text: str, value: float, kind: MetricKind = MetricKind.GAUGE, **labels: str) -> Metric:
    return Metric(f"headway:{name}", help_text, kind, value, tuple(labels.items()))
