"""Prometheus metrics of the jobs deployment, and their counts in the database."""

from collections.abc import Iterable

from replicas.protocol import Band, Metric, MetricKind
from replicas.timing.clock import Clock
from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus, RequestCounts
from serve_app.jobs.api.responses import StoredSize, StoredSums
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.metrics import jobs_metrics, stored_metrics
from serve_app.jobs.storage.batch_states import cancel_batch
from serve_app.jobs.storage.lines import end_lines
from serve_app.jobs.storage.rows.batch_queue import Backlog
from serve_app.jobs.storage.rows.batches import count_by_status, running_batches
from serve_app.jobs.webhooks.sender import AttemptOutcome
from testkit.jobs.database_worlds import World, new_batch, success


def values(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the values by name and label, such as `headway:jobs state=completed`."""
    return {" ".join((metric.name, *map("=".join, metric.labels))): metric.value for metric in metrics}


def test_every_state_and_outcome_is_shown_from_the_start() -> None:
    shown = values(jobs_metrics({}, {}, 0.0, dict.fromkeys(AttemptOutcome, 0)))
    assert set(shown.values()) == {0}
    states = {f"headway:jobs state={state}" for state in ("validating", "in_progress", "completed", "cancelled")}
    assert states | {"headway:webhook_deliveries outcome=dead"} < shown.keys()


def test_counts_show_with_their_labels_and_kinds() -> None:
    attempts = {AttemptOutcome.DELIVERED: 2, AttemptOutcome.FAILED: 1, AttemptOutcome.DEAD: 0}
    ended = {LineStatus.SUCCEEDED: 1, LineStatus.EXPIRED: 5}
    metrics = list(jobs_metrics({BatchStatus.IN_PROGRESS: 3}, ended, 12.5, attempts))
    assert {name: value for name, value in values(metrics).items() if value} == {
        "headway:jobs state=in_progress": 3,
        "headway:batch_requests status=succeeded": 1,
        "headway:batch_requests status=expired": 5,
        "headway:batch_eta_seconds": 12.5,
        "headway:webhook_deliveries outcome=delivered": 2,
        "headway:webhook_deliveries outcome=failed": 1,
    }
    kinds = {metric.name: metric.kind for metric in metrics}
    assert kinds["headway:jobs"] is MetricKind.GAUGE and kinds["headway:batch_requests"] is MetricKind.COUNTER


def test_stored_responses_are_counted_by_tenant_and_the_rest_together() -> None:
    sums = StoredSums(
        StoredSize(10, 3, 1000, 40.0), 5, {"a": StoredSize(4, 2, 600, 50.0), "b": StoredSize(1, 0, 90, 60.0)}
    )
    assert values(stored_metrics(sums, 100.0)) == {
        "headway:stored_responses tenant=a": 4,
        "headway:stored_bytes tenant=a": 600,
        "headway:stored_responses tenant=b": 1,
        "headway:stored_bytes tenant=b": 90,
        "headway:stored_responses tenant=other": 5,
        "headway:stored_bytes tenant=other": 310,
        "headway:oldest_stored_response_seconds": 60,
    }


async def test_counts_are_of_all_tenants(world: World) -> None:
    for tenant in ("t", "u"):
        for number in range(2):
            await world.submit(new_batch(2, tenant=tenant), f"{tenant}-{number}")
    await world.write(lambda c: cancel_batch(c, "t", "t-0", world.now))
    assert await world.write(count_by_status) == {BatchStatus.IN_PROGRESS: 3, BatchStatus.CANCELLING: 1}


def test_the_eta_is_infinite_without_progress() -> None:
    throughput = ThroughputEstimator(Clock(monotonic=lambda: 0.0))
    assert throughput.eta_of_all_s([]) == 0.0
    assert throughput.eta_of_all_s([Backlog(Band.BATCH, None, 3, 300)]) == float("inf")


async def test_the_newest_batches_that_run_are_shown_with_their_progress(world: World) -> None:
    await world.add_owner("me")
    for number in range(3):
        await world.submit(new_batch(2 + number, BatchKind.PROMPTS, callback_url="http://127.0.0.1:9/"), f"b-{number}")
        world.now += 1
    await world.submit(new_batch(1, BatchKind.JOB), "job")
    await world.write(lambda c: cancel_batch(c, "acme", "b-2", world.now))
    [line] = await world.lease("me", "b-1", 1)
    await world.write(lambda c: end_lines(c, "me", [success(line)], world.now))
    shown = await world.database.read(lambda c: running_batches(c, 3))
    assert [(batch.id, batch.counts) for batch in shown] == [
        ("b-1", RequestCounts(3, 1, 0)),
        ("b-0", RequestCounts(2, 0, 0)),
    ]
    assert all(batch.has_webhook for batch in shown)
