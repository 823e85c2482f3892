"""The end of a batch of a file, and what comes after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_app.jobs.api.records import BatchKind, BatchStatus, FileRecord, NewLine
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.sweeper import Sweeper
from serve_app.jobs.lifecycle.validator import OwnershipLost
from serve_app.jobs.storage.batch_states import CLOSING, UnclaimedBatches, begin_batch
from serve_app.jobs.storage.batches import BatchRow, select_batch
from serve_app.jobs.storage.database import Database
from serve_app.jobs.storage.files import add_file, expire_files, pending_deletion
from serve_app.jobs.storage.leases import end_lines
from serve_app.jobs.storage.lines import add_lines, new_row
from serve_app.jobs.storage.ownership import reap_owner
from testkit.jobs.database_worlds import MODEL, MemoryFiles, World, body, failure, new_batch, success

OWNER = "owner"


class ClosingWorld(World):
    """A world with an owner, whose batches are about to be closed."""

    async def close(self, num_lines: int) -> BatchRow:
        """A batch whose lines have ended, the first of them badly; it is the owner's."""
        await self.add_owner(OWNER)
        await self.write(lambda c: add_file(c, FileRecord("file-1", "acme", "batch", "in.jsonl", 1, self.now)))
        batch_id = (await self.submit(new_batch(kind=BatchKind.FILE, input_file_id="file-1"))).batch.id
        assert await self.write(lambda c: UnclaimedBatches((BatchStatus.VALIDATING,), MODEL).claim(c, OWNER))
        rows = [new_row(batch_id, position, NewLine(f"id-{position}", body())) for position in range(num_lines)]
        tokens = sum(row["expected_tokens"] for row in rows)

        def begin(c):
            add_lines(c, rows)
            return begin_batch(c, batch_id, OWNER, num_lines, tokens, self.now)

        assert await self.write(begin)
        first, *others = await self.lease(OWNER, batch_id, num_lines)
        results = [failure(first), *map(success, others)]
        ended = await self.write(lambda c: end_lines(c, OWNER, results, self.now))
        assert ended.closing_batch_ids == [batch_id]
        return await self.claim()

    async def claim(self) -> BatchRow:
        claimed = await self.write(lambda c: UnclaimedBatches(CLOSING, MODEL).claim(c, OWNER))
        assert claimed is not None
        return claimed

    async def finalize(self, batch: BatchRow) -> None:
        await Finalizer(self.context, lambda *_: None).finalize(batch, OWNER)

    def sweeper(self) -> Sweeper:
        return Sweeper(self.context, lambda _: None)


@pytest.fixture
def world(database_url: str) -> Iterator[ClosingWorld]:
    database = Database(database_url)
    yield ClosingWorld(database)
    database.close()


async def test_whoever_comes_too_late_does_not_replace_the_files(world):
    lost = await world.close(250)
    await world.write(lambda c: reap_owner(c, OWNER))
    await world.add_owner(OWNER)
    await world.finalize(await world.claim())
    final = await world.write(lambda c: select_batch(c, lost.id))
    assert (final.status, final.output_file_id) == (BatchStatus.COMPLETED.value, lost.output_file_id)
    written = dict(world.files.files)
    assert [len(written[file_id].splitlines()) for file_id in (final.output_file_id, final.error_file_id)] == [249, 1]
    await world.sweeper().clean()  # the lines
    with pytest.raises(OwnershipLost):
        await world.finalize(lost)
    assert world.files.files == written


class StubbornFiles(MemoryFiles):
    """A store that will not delete some files."""

    async def delete(self, file_id: str) -> None:
        if file_id.startswith("file-a"):
            raise PermissionError(file_id)
        await super().delete(file_id)


async def test_files_that_cannot_be_deleted_do_not_keep_others(world):
    world.files = StubbornFiles()
    names = [f"file-a{number:02}" for number in range(25)] + [f"file-b{number:02}" for number in range(25)]
    for name in names:
        world.files.files[name] = b"x"
        record = FileRecord(name, "acme", "batch", "in.jsonl", 1, world.now, expires_unix_s=world.now)
        await world.write(lambda c, record=record: add_file(c, record))
    while await world.write(lambda c: expire_files(c, world.now, 20)):
        pass
    sweeper = world.sweeper()
    for _ in range(4):
        await sweeper.delete_pending_files()
    assert sorted(world.files.files) == names[:25]
    assert sorted(await world.write(lambda c: pending_deletion(c, 100))) == names[:25]
