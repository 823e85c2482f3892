"""Submissions of batches and files are accepted once, or refused."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import InvalidRequest, Overloaded
from serve_app.jobs.api.errors import FileInUse, IdempotencyKeyInUse, UnknownBatch, UnknownFile
from serve_app.jobs.api.records import BatchKind, BatchStatus, FileRecord, JobsSettings, PageRequest
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.lifecycle.state_loops import BatchEvents
from serve_app.jobs.service import SqlJobsService
from serve_app.jobs.storage.rows.batches import get_batch
from serve_app.jobs.storage.rows.files import (
    add_file,
    expire_files,
    forget_file,
    get_file,
    list_files,
    pending_deletion,
)
from serve_app.jobs.storage.schema.database import Database
from testkit.jobs.database_worlds import MODEL, World, new_batch


@pytest.fixture
def world(database: Database) -> World:
    return World(database, JobsSettings(MODEL, max_batch_lines=10, max_unfinished_batches=3, max_unfinished_lines=12))


def service_of(world: World) -> SqlJobsService:
    async def nothing() -> None: ...

    events = BatchEvents(on_lines=lambda bands: None, on_closing=lambda batch_ids: None)
    return SqlJobsService(world.context, events, ThroughputEstimator(world.clock), nothing, lambda *_: None)


def a_file(file_id: str = "file-1", **fields: Any) -> FileRecord:
    return replace(FileRecord(file_id, "acme", "batch", "in.jsonl", 10, 1_000_000.0), **fields)


async def test_the_same_key_and_body_give_the_same_batch(world):
    new = new_batch(idempotency_key="k", body_digest="d")
    first, second = await world.submit(new), await world.submit(new)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.batch == second.batch


async def test_the_same_key_with_another_body_is_refused(world):
    await world.submit(new_batch(idempotency_key="k", body_digest="d"))
    with pytest.raises(IdempotencyKeyInUse):
        await world.submit(new_batch(idempotency_key="k", body_digest="e"))


async def test_tenants_keys_are_their_own(world):
    first = await world.submit(new_batch(idempotency_key="k", body_digest="d"))
    other = await world.submit(new_batch(idempotency_key="k", body_digest="e", tenant="other"))
    assert other.is_new and other.batch.id != first.batch.id


async def test_a_batch_submitted_twice_is_accepted_once(world):
    service, new = service_of(world), new_batch(10, idempotency_key="k", body_digest="d")
    first = await service.submit(new, "batch_x")
    # Another key under the same id, or a full queue, changes nothing.
    assert await service.submit(replace(new, idempotency_key=None), "batch_x") == first
    assert await service.submit(new, "batch_x") == first
    page = await service.batches("acme", BatchKind.PROMPTS, PageRequest(10))
    assert [batch.id for batch in page.items] == ["batch_x"] and first.is_new
    with pytest.raises(Overloaded):
        await service.submit(replace(new, idempotency_key=None), "batch_y")


async def test_of_many_with_the_same_key_one_is_accepted(world):
    service, new = service_of(world), new_batch(1, idempotency_key="k", body_digest="d")
    submissions = await asyncio.gather(*(service.submit(new) for _ in range(5)))
    assert len({submission.batch.id for submission in submissions}) == 1
    assert [submission.is_new for submission in submissions].count(True) == 1


async def test_a_tenant_with_too_much_unfinished_work_has_to_wait(world):
    for _ in range(3):
        await world.submit(new_batch(1))
    with pytest.raises(Overloaded, match=r"3 batches and jobs have not ended; the limit is 3") as caught:
        await world.submit(new_batch(1))
    assert caught.value.code == "rate_limit_exceeded"
    assert (await world.submit(new_batch(10, tenant="other"))).is_new
    with pytest.raises(Overloaded, match=r"10 requests .* the limit is 12"):
        await world.submit(new_batch(3, tenant="other"))


@pytest.mark.parametrize("num_lines", [0, 11])
async def test_too_many_lines_or_none_are_refused(world, num_lines):
    with pytest.raises(InvalidRequest, match=f"has {num_lines} requests; 1 to 10 are accepted"):
        await world.submit(new_batch(num_lines))


async def test_an_input_file_needs_its_owner_and_purpose(world):
    await world.write(lambda c: add_file(c, a_file()))
    await world.write(lambda c: add_file(c, a_file("file-2", purpose="assistants")))
    for file_id, tenant in (("file-0", "acme"), ("file-1", "other")):
        with pytest.raises(UnknownFile):
            await world.submit(new_batch(kind=BatchKind.FILE, input_file_id=file_id, tenant=tenant))
    with pytest.raises(InvalidRequest, match="purpose"):
        await world.submit(new_batch(kind=BatchKind.FILE, input_file_id="file-2"))
    submission = await world.submit(new_batch(kind=BatchKind.FILE, input_file_id="file-1"))
    assert submission.batch.status is BatchStatus.VALIDATING


async def test_another_tenants_batch_is_unknown(world):
    submission = await world.submit(new_batch())
    with pytest.raises(UnknownBatch):
        await world.write(lambda c: get_batch(c, "other", submission.batch.id))


async def test_a_file_that_a_batch_reads_is_kept(world):
    await world.write(lambda c: add_file(c, a_file()))
    await world.submit(new_batch(kind=BatchKind.FILE, input_file_id="file-1"))
    with pytest.raises(FileInUse):
        await world.write(lambda c: forget_file(c, "acme", "file-1", world.now))


async def test_an_expired_file_is_gone_and_its_bytes_will_be_deleted(world):
    await world.write(lambda c: add_file(c, a_file(expires_unix_s=world.now + 5)))
    await world.write(lambda c: get_file(c, "acme", "file-1", world.now))
    world.now += 5
    with pytest.raises(UnknownFile):
        await world.write(lambda c: get_file(c, "acme", "file-1", world.now))
    assert await world.write(lambda c: expire_files(c, world.now, 10)) == 1
    assert await world.write(lambda c: pending_deletion(c, 10)) == ["file-1"]


@pytest.mark.parametrize("is_ascending", [False, True])
async def test_pages_show_every_file_once_in_order(world, is_ascending):
    for number in range(7):
        await world.write(lambda c, n=number: add_file(c, a_file(f"file-{n}", created_unix_s=1000.0 + n // 2)))
    seen: list[str] = []
    has_more = True
    while has_more:
        after = seen[-1] if seen else None
        request = PageRequest(3, after, is_ascending)
        page = await world.write(lambda c, r=request: list_files(c, "acme", "batch", r, world.now))
        seen += [file.id for file in page.items]
        has_more = page.has_more
    expected = [f"file-{number}" for number in range(7)]
    assert seen == (expected if is_ascending else expected[::-1])
