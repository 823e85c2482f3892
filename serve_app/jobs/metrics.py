"""Prometheus metrics of the jobs deployment; ingresses serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from replicas.protocol import Metric, MetricKind
from serve_app.jobs.api.records import BatchStatus, LineStatus
from serve_app.jobs.api.responses import StoredSize, StoredSums
from serve_app.jobs.webhooks.sender import AttemptOutcome

NUM_STORED_TENANTS = 100
"""Most tenants whose stored responses have series of their own."""
_OTHERS = "other"
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


def stored_metrics(sums: StoredSums, now_unix_s: float) -> Iterator[Metric]:
    """Yield the metrics of stored responses and conversations, also without any."""
    shown = list(sums.largest.values())
    num_others = sums.total.num_responses - sum(size.num_responses for size in shown)
    num_other_bytes = sums.total.num_bytes - sum(size.num_bytes for size in shown)
    others = StoredSize(num_others, 0, num_other_bytes, None)
    for tenant, size in (*sums.largest.items(), (_OTHERS, others)):
        help_text = (
            f"Stored responses, of the {NUM_STORED_TENANTS} tenants with most bytes; tenant={_OTHERS} has the rest."
        )
        yield _metric("stored_responses", help_text, size.num_responses, tenant=tenant)
        yield _metric("stored_bytes", "Size of responses and conversations, likewise.", size.num_bytes, tenant=tenant)
    oldest_s = sums.total.oldest_unix_s
    age_s = 0.0 if oldest_s is None else max(0.0, now_unix_s - oldest_s)
    yield _metric("oldest_stored_response_seconds", "Age of the oldest stored response; 0 without one.", age_s)


def storage_metric(is_up: bool) -> Metric:
    """Return the metric of the storage."""
    help_text = "1 while the database of jobs can be used, 0 from a failure to the next write that succeeds."
    return _metric("jobs_storage_up", help_text, float(is_up))


def _metric(name: str, help_text: str, value: float, kind: MetricKind = MetricKind.GAUGE, **labels: str) -> Metric:
    return Metric(f"headway:{name}", help_text, kind, value, tuple(labels.items()))
