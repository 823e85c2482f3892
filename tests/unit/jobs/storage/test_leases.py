"""Leases of lines: their owners, and the order of lines."""

from typing import Any

import pytest
from sqlalchemy import select

from replicas.protocol import Band
from serve_app.jobs.api.errors import BatchNotCancellable
from serve_app.jobs.api.new_lines import NewLine, NewLines
from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus
from serve_app.jobs.storage.batch_states import cancel_batch, expire_batches
from serve_app.jobs.storage.deliveries import SqlOutbox
from serve_app.jobs.storage.lines import end_lines, release_lines
from serve_app.jobs.storage.ownership import Ownership, dead_owners, heartbeat, reap_owner
from serve_app.jobs.storage.rows.batch_queue import backlog, open_batches
from serve_app.jobs.storage.rows.batches import batch_record, list_lines, select_batch
from serve_app.jobs.storage.schema.tables import batches
from serve_app.jobs.webhooks.receivers import Closed, Receiver
from testkit.jobs.database_worlds import MODEL, World, body, failure, new_batch, success


@pytest.fixture
async def owners(world: World) -> tuple[str, str]:
    await world.add_owner("a")
    await world.add_owner("b")
    return "a", "b"


async def submit(world: World, *args: object, **fields: Any) -> str:
    return (await world.submit(new_batch(*args, **fields))).batch.id  # type: ignore[arg-type]


async def status_of(world: World, batch_id: str) -> BatchStatus:
    return batch_record(await world.write(lambda c: select_batch(c, batch_id))).status


async def test_a_line_is_leased_to_one_owner(world, owners):
    batch_id = await submit(world, 3)
    first, second = await world.lease("a", batch_id, 2), await world.lease("b", batch_id, 2)
    assert sorted(line.position for line in first + second) == [0, 1, 2]


async def test_long_lines_run_first_and_shared_prefixes_together(world, owners):
    beginnings = ["x" * 300, "y" * 300]
    lines = [NewLine(f"{i}", body(prompt=beginnings[i % 2], max_tokens=400 if i >= 4 else 4)) for i in range(8)]
    batch_id = await submit(world, lines=NewLines(lines))
    positions = [line.position for line in await world.lease("a", batch_id)]
    assert sorted(positions[:4]) == [4, 5, 6, 7]
    assert all(positions[at] % 2 == positions[at + 1] % 2 for at in (0, 2, 4, 6))


async def test_a_silent_owner_loses_its_lines_and_its_results(world, owners):
    batch_id = await submit(world, 2)
    lost = await world.lease("a", batch_id)
    world.now += 11
    await world.write(lambda c: heartbeat(c, "b", world.now))
    world.now += 11  # no owner has reported for 11 s, yet "b" is alive, since it asks
    assert await world.write(lambda c: dead_owners(c, "b", world.now, 10.0)) == ["a"]
    assert await world.write(lambda c: reap_owner(c, "a")) == 2
    again = await world.lease("b", batch_id)
    assert [line.attempt for line in again] == [2, 2]
    ended = await world.write(lambda c: end_lines(c, "a", [success(line) for line in lost], world.now))
    assert ended.counted == []
    ended = await world.write(lambda c: end_lines(c, "b", [failure(line) for line in again], world.now))
    assert len(ended.counted) == 2 and ended.final_batch_ids == [batch_id]


async def test_an_owner_declared_dead_gets_no_lines(world, owners):
    batch_id = await submit(world, 2)
    await world.write(lambda c: reap_owner(c, "a"))
    assert await world.lease("a", batch_id) == []
    assert not await world.write(lambda c: heartbeat(c, "a", world.now))


async def test_what_is_given_back_can_be_leased_again(world, owners):
    batch_id = await submit(world, 2)
    lines = await world.lease("a", batch_id)
    await world.write(lambda c: release_lines(c, "a", lines))
    assert len(await world.lease("b", batch_id)) == 2
    assert (await world.write(lambda c: end_lines(c, "a", [success(lines[0])], world.now))).counted == []


async def test_a_failed_request_fails_its_job_and_is_announced(world, owners):
    batch_id = await submit(world, 1, BatchKind.JOB, callback_url="http://example.org/hook")
    [line] = await world.lease("a", batch_id)
    await world.write(lambda c: end_lines(c, "a", [failure(line)], world.now))
    assert await status_of(world, batch_id) is BatchStatus.FAILED
    outbox = SqlOutbox(world.context, Ownership(world.context))
    [pending] = await outbox.due_deliveries(world.now, 10)
    assert (pending.batch_id, pending.event, pending.num_attempts) == (batch_id, "response.failed", 0)
    assert pending.tenant == "acme"
    for closed, is_due in (
        (Closed(receivers=frozenset({Receiver("acme", "example.org")})), False),
        (Closed(receivers=frozenset({Receiver("acme", "other.org"), Receiver("zeta", "example.org")})), True),
        (Closed(tenants=frozenset({"acme"})), False),
        (Closed(delivery_ids=frozenset({pending.id})), False),
    ):
        assert bool(await outbox.due_deliveries(world.now, 10, closed)) is is_due
    with pytest.raises(BatchNotCancellable):
        await world.write(lambda c: cancel_batch(c, "acme", batch_id, world.now))


async def test_a_batch_that_is_cancelled_or_late_gives_no_more_lines(world, owners):
    cancelled, late = await submit(world, 2), await submit(world, 2, window_s=5.0)
    await world.write(lambda c: cancel_batch(c, "acme", cancelled, world.now))
    world.now += 5
    assert await world.write(lambda c: expire_batches(c, MODEL, world.now)) == [late]
    assert await world.lease("a", cancelled) == await world.lease("a", late) == []
    assert await status_of(world, cancelled) is BatchStatus.CANCELLING
    assert await status_of(world, late) is BatchStatus.FINALIZING


async def test_another_models_batches_are_left_alone(world):
    batch_id = await submit(world, 2, window_s=1.0)
    await world.write(lambda c: c.execute(batches.update().values(model="another")))
    world.now += 5
    assert await world.write(lambda c: expire_batches(c, MODEL, world.now)) == []
    assert await world.write(lambda c: open_batches(c, MODEL, 10)) == []
    assert (await world.write(lambda c: c.execute(select(batches.c.id)).scalar())) == batch_id


async def test_open_batches_come_by_band_then_by_deadline(world, owners):
    submitted: dict[str, dict[str, Any]] = {
        "late": {"window_s": 60.0},
        "never": {},
        "soon": {"window_s": 30.0},
        "standard": {"band": Band.STANDARD},
    }
    for name, fields in submitted.items():
        await world.submit(new_batch(2, **fields), name)
    taken = await world.lease("a", "soon", 1)
    found = await world.write(lambda c: open_batches(c, MODEL, 10))
    assert [(batch.id, batch.num_queued) for batch in found] == [
        ("standard", 2),
        ("soon", 1),
        ("late", 2),
        ("never", 2),
    ]
    await world.write(lambda c: end_lines(c, "a", [success(line) for line in taken], world.now))
    waiting = await world.write(lambda c: backlog(c, MODEL))
    assert sum(part.num_lines for part in waiting) == 7
    assert {part.band for part in waiting} == {Band.STANDARD, Band.BATCH}


async def test_only_some_batches_of_each_tenant_are_read(world):
    for number in range(5):
        await submit(world, 1, tenant="eager")
        if number == 4:
            await submit(world, 1, tenant="modest")
    found = await world.write(lambda c: open_batches(c, MODEL, 2))
    assert [batch.tenant for batch in found] == ["eager", "eager", "modest"]


async def test_lines_show_their_results_in_order(world, owners):
    batch_id = await submit(world, 3)
    lines = sorted(await world.lease("a", batch_id), key=lambda line: line.position)
    await world.write(lambda c: end_lines(c, "a", [success(lines[0]), failure(lines[1])], world.now))
    await world.write(lambda c: release_lines(c, "a", lines))
    shown = await world.write(lambda c: list_lines(c, "acme", batch_id, -1, 10))
    assert [line.status for line in shown] == [LineStatus.SUCCEEDED, LineStatus.FAILED, LineStatus.QUEUED]
    assert shown[0].response == {"text": "yes"} and shown[1].error is not None
    assert [line.index for line in await world.write(lambda c: list_lines(c, "acme", batch_id, 0, 1))] == [1]
