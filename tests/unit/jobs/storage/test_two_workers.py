"""Two workers that do the same at the same time: one of them does it."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sqlalchemy import Connection, select, update

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind, FileRecord
from serve_app.jobs.api.usage import UsageKey, UsageReport, UsageRow, UsageSums
from serve_app.jobs.storage.deliveries import SqlOutbox
from serve_app.jobs.storage.lines import end_lines
from serve_app.jobs.storage.ownership import Ownership, reap_owner
from serve_app.jobs.storage.rows.files import add_file, expire_files, pending_deletion
from serve_app.jobs.storage.rows.usage import add_report
from serve_app.jobs.storage.schema.database import Database, JobsContext
from serve_app.jobs.storage.schema.tables import deliveries, usage, usage_reporters
from testkit.jobs.database_worlds import World, new_batch, success
from testkit.jobs.postgresql import PostgreSQL
from testkit.limits import LIMIT_S

NUM_ROUNDS = 10


@pytest.fixture
def pair(postgresql_server: PostgreSQL) -> Iterator[tuple[Database, Database]]:
    """Yield the same empty database as each of two workers has it."""
    with postgresql_server.fresh_database() as url:
        first, second = Database.opened(url), Database.opened(url)
        yield first, second
        first.close()
        second.close()


async def owned_outbox(world: World) -> tuple[SqlOutbox, Ownership]:
    context = JobsContext(world.database, world.files, world.settings, bytes(64), world.clock)
    ownership = Ownership(context)
    await ownership.start()
    return SqlOutbox(context, ownership), ownership


async def due(world: World, number: int) -> list[str]:
    """End some jobs and return the ids of their webhooks."""
    await world.add_owner("me")
    for _ in range(number):
        batch = (await world.submit(new_batch(1, BatchKind.JOB, callback_url="http://x/y"))).batch
        [line] = await world.lease("me", batch.id)
        await world.write(lambda c, line=line: end_lines(c, "me", [success(line)], world.now))  # type: ignore[misc]
    return list(await world.database.read(lambda c: c.execute(select(deliveries.c.id)).scalars()))


async def test_a_webhook_is_claimed_by_one_worker(world: World) -> None:
    ids = await due(world, 6)
    (first, _), (second, _) = await owned_outbox(world), await owned_outbox(world)
    claimed = await asyncio.gather(first.claim(ids, world.now), second.claim(ids, world.now))
    assert sorted([*claimed[0], *claimed[1]]) == sorted(ids)
    assert await first.due_deliveries(world.now, 10) == await second.due_deliveries(world.now, 10) == []


async def test_a_webhook_of_a_dead_worker_is_sent_by_another_one_and_recorded_once(world: World) -> None:
    [webhook_id] = await due(world, 1)
    (first, dead), (second, _) = await owned_outbox(world), await owned_outbox(world)
    [webhook] = await first.due_deliveries(world.now, 10)
    assert await first.claim([webhook_id], world.now) == {webhook_id}
    await world.write(lambda c: reap_owner(c, dead.id))
    assert await first.claim([webhook_id], world.now) == set(), "it was declared dead"
    assert await second.claim([webhook_id], world.now) == {webhook_id}
    await first.delivery_failed(webhook, world.now + 60, "it came too late")
    assert await attempts(world) == [(0, world.now, None)]
    await second.delivered(webhook)
    await first.delivered(webhook)
    assert await attempts(world) == [(1, None, None)]


async def test_an_outcome_counts_where_nobody_has_taken_the_webhook_over(world: World) -> None:
    [webhook_id] = await due(world, 1)
    outbox, ownership = await owned_outbox(world)
    [webhook] = await outbox.due_deliveries(world.now, 10)
    await outbox.claim([webhook_id], world.now)
    await ownership.renew()  # as after an outage of the database
    await outbox.delivery_failed(webhook, world.now + 60, "status 500")
    assert await attempts(world) == [(1, world.now + 60, "status 500")]
    assert await outbox.claim([webhook_id], world.now) == set(), "it is not due now"


async def attempts(world: World) -> list[tuple[int, float | None, str | None]]:
    columns = select(deliveries.c.num_attempts, deliveries.c.next_attempt_unix_s, deliveries.c.error)
    return [tuple(row) for row in await world.database.read(lambda c: c.execute(columns).all())]


async def test_expired_files_are_deleted_by_one_worker(pair: tuple[Database, Database]) -> None:
    def add_files(connection: Connection, turn: int) -> None:
        for n in range(20):
            add_file(connection, FileRecord(f"file-{turn}-{n}", "acme", "batch", "x", 1, 1.0, 2.0))

    for turn in range(NUM_ROUNDS):
        await pair[0].write(partial(add_files, turn=turn))
        await asyncio.gather(*(database.write(lambda c: expire_files(c, 3.0, 20)) for database in pair))
    assert len(await pair[0].read(lambda c: pending_deletion(c, 1000))) == 20 * NUM_ROUNDS


async def test_a_report_of_usage_that_comes_to_both_counts_once(pair: tuple[Database, Database]) -> None:
    keys = [UsageKey("2026-01-01", f"tenant-{n}", "m", Band.BATCH) for n in range(5)]
    rng = random.Random(0)
    for number in range(1, NUM_ROUNDS + 1):
        rows = [UsageRow(key, UsageSums(num_requests=1)) for key in keys]
        rng.shuffle(rows)
        report = UsageReport("ingress", number, tuple(rows))
        senders = pair if number > 1 else pair[:1]
        await asyncio.gather(*(each.write(lambda c, report=report: add_report(c, report, 1.0)) for each in senders))  # type: ignore[misc]
    counted = await pair[0].read(lambda c: c.execute(select(usage.c.num_requests)).scalars().all())
    assert counted == [NUM_ROUNDS] * len(keys)


async def test_a_transaction_that_ends_in_a_deadlock_is_repeated(pair: tuple[Database, Database]) -> None:
    for name in ("a", "b"):
        await pair[0].write(partial(add_report, report=UsageReport(name, 1, ()), now=1.0))
    both_have_one = threading.Barrier(2)
    num_tries = {"a": 0, "b": 0}

    def lock_both(first: str, second: str) -> Callable[[Connection], None]:
        def work(connection: Connection) -> None:
            num_tries[first] += 1
            for name in (first, second):
                row = update(usage_reporters).where(usage_reporters.c.id == name)
                connection.execute(row.values(number=usage_reporters.c.number + 1))
                if name == first and num_tries[first] == 1:
                    both_have_one.wait(LIMIT_S)

        return work

    works = (lock_both("a", "b"), lock_both("b", "a"))
    await asyncio.gather(*(each.write(work) for each, work in zip(pair, works, strict=True)))
    assert sum(num_tries.values()) > 2, "the database has ended one of them"
    assert await pair[0].read(lambda c: c.execute(select(usage_reporters.c.number)).scalars().all()) == [3, 3]
