"""What the jobs deployment tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replicas.clock import Clock
from replicas.protocol import Band, Metric, MetricKind
from serve_app.jobs.api.records import BatchKind, LineStatus, NewBatch, NewLine
from serve_app.jobs.api.settings import JobsSettings
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.metrics import JobsMetrics, LineCounts
from serve_app.jobs.storage.batch_queue import Backlog
from serve_app.jobs.storage.batch_states import cancel_batch
from serve_app.jobs.storage.database import Database
from serve_app.jobs.storage.lines import new_row
from serve_app.jobs.storage.submission import submit_batch
from serve_app.jobs.webhooks.sender import AttemptOutcome

LINES = (NewLine("a", {"prompt": "x"}), NewLine("b", {"prompt": "y"}))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


async def submit(database: Database, tenant: str, batch_id: str) -> None:
    batch = NewBatch(BatchKind.PROMPTS, tenant, "/v1/completions", Band.BATCH, None, lines=LINES)
    rows = [new_row(batch_id, position, line) for position, line in enumerate(LINES)]
    await database.write(lambda c: submit_batch(c, batch, batch_id, rows, JobsSettings("m"), 1000.0))


def value(metrics: tuple[Metric, ...], name: str, **labels: str) -> float:
    [found] = [metric for metric in metrics if metric.name == name and dict(metric.labels) == labels]
    return found.value


async def test_every_state_and_outcome_shows_before_anything_has_happened(database: Database) -> None:
    attempts = dict.fromkeys(AttemptOutcome, 0)
    metrics = await JobsMetrics(database, LineCounts(), lambda: 0.0, lambda: attempts).read()
    assert {metric.value for metric in metrics} == {0}
    states = {dict(metric.labels)["state"] for metric in metrics if metric.name == "headway:jobs"}
    assert {"validating", "in_progress", "completed", "cancelled"} < states
    assert value(metrics, "headway:webhook_deliveries", outcome="dead") == 0


async def test_counts_are_of_all_tenants(database: Database) -> None:
    for tenant in ("t", "u"):
        for number in range(2):
            await submit(database, tenant, f"{tenant}-{number}")
    await database.write(lambda c: cancel_batch(c, "t", "t-0", 1001.0))
    lines = LineCounts()
    lines.add(LineStatus.SUCCEEDED)
    lines.add(LineStatus.EXPIRED, 5)
    attempts = {AttemptOutcome.DELIVERED: 2, AttemptOutcome.FAILED: 1, AttemptOutcome.DEAD: 0}
    metrics = await JobsMetrics(database, lines, lambda: 12.5, lambda: attempts).read()
    assert value(metrics, "headway:jobs", state="in_progress") == 3
    assert value(metrics, "headway:batch_requests", status="succeeded") == 1
    assert value(metrics, "headway:batch_requests", status="expired") == 5
    assert value(metrics, "headway:batch_eta_seconds") == 12.5
    assert value(metrics, "headway:webhook_deliveries", outcome="delivered") == 2
    kinds = {metric.name: metric.kind for metric in metrics}
    assert kinds["headway:jobs"] is MetricKind.GAUGE and kinds["headway:batch_requests"] is MetricKind.COUNTER


def test_the_eta_is_infinite_only_while_something_waits_that_does_not_move() -> None:
    throughput = ThroughputEstimator(Clock(monotonic=lambda: 0.0))
    assert throughput.eta_of_all_s([]) == 0.0
    assert throughput.eta_of_all_s([Backlog(Band.BATCH, None, 3, 300)]) == float("inf")
