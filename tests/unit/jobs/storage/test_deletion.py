"""Deletion of batches: gone at once for their tenant, and their lines soon."""

from collections import Counter

import pytest
from sqlalchemy import Connection, func, select

from serve_app.jobs.api.errors import BatchInProgress, UnknownBatch
from serve_app.jobs.api.records import BatchKind, BatchStatus, PageRequest
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.sweeper import Sweeper
from serve_app.jobs.storage.batch_states import CLOSING, cancel_batch, delete_batch
from serve_app.jobs.storage.lines import end_lines
from serve_app.jobs.storage.rows.batches import batch_record, count_by_status, list_batches, select_batch
from serve_app.jobs.storage.schema.database import Database
from serve_app.jobs.storage.schema.tables import idempotency_keys, lines
from testkit.jobs.database_worlds import World, failure, new_batch, success

OWNER = "owner"


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


async def cancelled(world: World) -> str:
    """Return the id of a cancelled batch of five lines: one succeeded, one failed, three were left undone."""
    await world.add_owner(OWNER)
    new = new_batch(5, BatchKind.MESSAGES, idempotency_key="k", body_digest="d")
    batch_id = (await world.submit(new)).batch.id
    good, bad = await world.lease(OWNER, batch_id, 2)
    await world.write(lambda c: end_lines(c, OWNER, [success(good), failure(bad)], world.now))
    await world.write(lambda c: cancel_batch(c, "acme", batch_id, world.now))
    batch = await world.claim(OWNER, *CLOSING)
    assert batch is not None
    await Finalizer(world.context, Counter()).finalize(batch, OWNER)
    return batch_id


async def test_lines_that_the_end_left_undone_are_counted_by_themselves(world: World) -> None:
    batch_id = await cancelled(world)
    batch = batch_record(await world.write(lambda c: select_batch(c, batch_id)))
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.counts.completed, batch.counts.failed, batch.num_undone) == (1, 4, 3)


async def test_a_deleted_batch_is_gone_and_then_its_lines(world: World) -> None:
    batch_id = await cancelled(world)
    with pytest.raises(UnknownBatch):
        await world.write(lambda c: delete_batch(c, "zeta", batch_id))
    for _ in range(2):
        await world.write(lambda c: delete_batch(c, "acme", batch_id))

    def left(connection: Connection) -> tuple[int, int, int]:
        page = list_batches(connection, "acme", BatchKind.MESSAGES, PageRequest(10))
        keys = connection.execute(select(func.count()).select_from(idempotency_keys)).scalar_one()
        return len(page.items), keys, connection.execute(select(func.count()).select_from(lines)).scalar_one()

    assert await world.write(left) == (0, 0, 5)
    await Sweeper(world.context, lambda batch_id: None).clean()
    assert await world.write(left) == (0, 0, 0)
    with pytest.raises(UnknownBatch):
        await world.write(lambda c: delete_batch(c, "acme", batch_id))
    assert not await world.write(count_by_status)


async def test_a_batch_that_runs_is_not_deleted(world: World) -> None:
    batch_id = (await world.submit(new_batch(2, BatchKind.MESSAGES))).batch.id
    with pytest.raises(BatchInProgress, match="is in_progress; it can be deleted when it has ended"):
        await world.write(lambda c: delete_batch(c, "acme", batch_id))
