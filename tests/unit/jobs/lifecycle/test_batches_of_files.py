"""Whole files: each bad line has its error, no line of a bad file runs, and results are written once."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from sqlalchemy import Connection, func, select, text

from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStatus,
    FileRecord,
    JobsSettings,
    JsonObject,
    RequestCounts,
)
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.sweeper import Sweeper
from serve_app.jobs.lifecycle.validator import OwnershipLost, Validator
from serve_app.jobs.storage.batch_states import CLOSING, cancel_batch
from serve_app.jobs.storage.lines import MANY_LINES, delete_lines, end_lines
from serve_app.jobs.storage.ownership import reap_owner
from serve_app.jobs.storage.rows.batches import BatchRow, batch_record, list_lines, select_batch
from serve_app.jobs.storage.rows.files import add_file, expire_files, pending_deletion
from serve_app.jobs.storage.schema.database import Database
from serve_app.jobs.storage.schema.tables import lines
from testkit.jobs.database_worlds import ENDPOINT, MODEL, World, body, failure, new_batch, success
from testkit.jobs.memory_files import MemoryFiles

pytestmark = pytest.mark.rotated

OWNER = "owner"


class FileWorld(World):
    """A world with an owner and small limits, whose batches are of files."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, JobsSettings(MODEL, max_batch_lines=500, max_file_bytes=200_000, max_line_bytes=400))

    async def start(self, data: bytes, endpoint: str = ENDPOINT) -> str:
        """Submit a batch of a file with this content; it is about to be validated."""
        self.files.files["file-1"] = data
        record = FileRecord("file-1", "acme", "batch", "in.jsonl", len(data), self.now)
        await self.write(lambda c: add_file(c, record))
        await self.add_owner(OWNER)
        return (await self.submit(new_batch(kind=BatchKind.FILE, input_file_id="file-1", endpoint=endpoint))).batch.id

    async def validate(self, data: bytes, endpoint: str = ENDPOINT) -> BatchRecord:
        return await self.go_on(await self.start(data, endpoint))

    async def go_on(self, batch_id: str) -> BatchRecord:
        batch = await self.claim(OWNER, BatchStatus.VALIDATING)
        assert batch is not None
        await Validator(self.context).validate(batch, OWNER)
        return batch_record(await self.write(lambda c: select_batch(c, batch_id)))

    async def run(self, num_lines: int) -> BatchRow | None:
        """Run a batch until its lines have ended, the first with an error; return it, claimed by the owner."""
        batch_id = (await self.validate(file_of(*(line(f"{number}") for number in range(num_lines))))).id
        first, *others = await self.lease(OWNER, batch_id, num_lines)
        results = [failure(first), *map(success, others)]
        ended = await self.write(lambda c: end_lines(c, OWNER, results, self.now))
        assert ended.closing_batch_ids == [batch_id]
        return await self.claim(OWNER, *CLOSING)

    async def finalize(self, batch: BatchRow) -> None:
        await Finalizer(self.context, Counter()).finalize(batch, OWNER)

    def sweeper(self) -> Sweeper:
        return Sweeper(self.context, lambda _: None)


@pytest.fixture
def world(database: Database) -> FileWorld:
    return FileWorld(database)


def line(custom_id: str = "a", **fields: object) -> JsonObject:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body(), **fields}


def file_of(*lines: JsonObject | str) -> bytes:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()


async def test_a_good_file_is_in_progress_with_all_its_lines(world):
    names = [f"name-{index}" for index in range(450)]
    record = await world.validate(b"\xef\xbb\xbf" + file_of(*(line(name) for name in names), "", "  \r"))
    assert (record.status, record.counts) == (BatchStatus.IN_PROGRESS, RequestCounts(450, 0, 0))
    assert [one.custom_id for one in await world.write(lambda c: list_lines(c, "acme", record.id, -1, 1000))] == names


def known_to_the_planner(connection: Connection) -> float:
    """Return the number of lines by PostgreSQL's statistics, or by a count: SQLite's planner needs none."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(text("SELECT reltuples FROM pg_class WHERE relname = 'lines'")).scalar_one())
    return float(connection.execute(select(func.count()).select_from(lines)).scalar_one())


@pytest.mark.parametrize("is_file", [True, False])
async def test_the_planner_knows_of_many_new_lines_at_once(world, is_file):
    world.settings = replace(world.settings, max_batch_lines=2 * MANY_LINES)
    # As autovacuum leaves it when the lines of earlier batches have been deleted.
    await world.write(lambda c: c.execute(text("ANALYZE lines")))
    if is_file:
        await world.validate(file_of(*(line(f"{number}") for number in range(MANY_LINES))))
    else:
        await world.submit(new_batch(MANY_LINES))
    assert await world.write(known_to_the_planner) == MANY_LINES


BAD_LINES: dict[str, tuple[JsonObject | str, str, str | None]] = {
    "no json": ("{", "invalid_json_line", None),
    "no object": ("[1]", "invalid_json_line", None),
    "no custom_id": ({"method": "POST", "url": ENDPOINT, "body": {}}, "missing_required_parameter", "custom_id"),
    "empty custom_id": (line(""), "invalid_value", "custom_id"),
    "get": (line(method="GET"), "invalid_value", "method"),
    "another url": (line(url="/v1/chat/completions"), "mismatched_url", "url"),
    "unknown field": (line(what=1), "invalid_value", "what"),
    "body is text": (line(body="x"), "invalid_value", "body"),
    "another model": (line(body=body(model="gpt-9")), "model_not_found", "body.model"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", BAD_LINES)
async def test_a_bad_line_fails_the_whole_file_and_is_named(world, name):
    bad, code, param = BAD_LINES[name]
    record = await world.validate(file_of(line("good"), bad, line("also good")))
    assert record.status is BatchStatus.FAILED
    [error] = record.errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert await world.write(lambda c: delete_lines(c, record.id, 10)) == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "bad",
    [body(max_tokens="4"), body(max_tokens=-(10**30)), body(n=10**30), body(prompt=[]), body(prompt=[[]]), {},
     body(prompt={"a": [1]}), {"messages": 3}, {"messages": [3, {"content": [None]}]}, body(model=7)],
)  # fmt: skip
async def test_an_invalid_body_does_not_fail_the_file(world, bad):
    record = await world.validate(file_of(line("good"), line("bad", body=bad)))
    assert (record.status, record.counts.total) == (BatchStatus.IN_PROGRESS, 2)


async def test_every_bad_line_is_named_but_not_thousands(world):
    record = await world.validate(file_of(*(["{"] * 10 + [line("a"), line("a")])))
    assert [error.line for error in record.errors] == [*range(1, 11), 12]
    assert record.errors[-1].code == "duplicate_custom_id"


async def test_the_number_of_reported_errors_is_bounded(world):
    assert len((await world.validate(file_of(*["{"] * 300))).errors) == 50


async def test_a_duplicate_is_found_over_any_distance(world):
    record = await world.validate(file_of(*(line(f"{index}") for index in range(450)), line("0")))
    assert [(error.code, error.line) for error in record.errors] == [("duplicate_custom_id", 451)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (file_of(*(line(f"{index}") for index in range(501))), "too_many_lines"),
        (file_of(line(body=body(prompt="x" * 500))), "line_too_long"),
        (b"x" * 1000, "line_too_long"),
        (b"\n" * 200_001, "file_too_large"),
    ],
)
async def test_limits_of_a_file(world, data, code):
    record = await world.validate(data)
    assert (record.status, record.errors[-1].code) == (BatchStatus.FAILED, code)


async def test_a_file_whose_bytes_are_gone_fails_its_batch(world):
    batch_id = await world.start(file_of(line()))
    world.files.files.clear()
    assert [error.code for error in (await world.go_on(batch_id)).errors] == ["file_not_found"]


async def test_an_interrupted_validation_starts_again(world):
    batch_id = await world.start(file_of(*(line(f"{index}") for index in range(450))))
    failing = _FailingFiles(world.files.files, after_parts=8)
    batch = await world.claim(OWNER, BatchStatus.VALIDATING)
    with pytest.raises(OSError):
        await Validator(replace(world.context, files=failing)).validate(batch, OWNER)
    assert await world.write(lambda c: len(list_lines(c, "acme", batch_id, -1, 1000))) > 0
    await world.write(lambda c: c.exec_driver_sql("UPDATE batches SET owner = NULL"))
    assert (await world.go_on(batch_id)).counts.total == 450


async def test_validation_stops_for_a_cancelled_batch(world):
    batch_id = await world.start(file_of(line()))
    batch = await world.claim(OWNER, BatchStatus.VALIDATING)
    await world.write(lambda c: cancel_batch(c, "acme", batch_id, world.now))
    with pytest.raises(OwnershipLost):
        await Validator(world.context).validate(batch, OWNER)


class _FailingFiles(MemoryFiles):
    """A store that stops in the middle of a file."""

    def __init__(self, files: dict[str, bytes], after_parts: int) -> None:
        super().__init__(files)
        self.after_parts = after_parts

    async def read(self, file_id):
        async for part in super().read(file_id):
            self.after_parts -= 1
            if self.after_parts < 0:
                raise OSError("the store went away")
            yield part


async def test_an_owner_that_lost_a_batch_leaves_its_lines_alone(world):
    batch_id = await world.start(file_of(line("a"), line("b")))
    claimed = await world.claim(OWNER, BatchStatus.VALIDATING)
    await world.write(lambda c: reap_owner(c, OWNER))
    await world.add_owner(OWNER)
    assert (await world.go_on(batch_id)).status is BatchStatus.IN_PROGRESS
    with pytest.raises(OwnershipLost):
        await Validator(world.context).validate(claimed, OWNER)
    assert len(await world.write(lambda c: list_lines(c, "acme", batch_id, -1, 10))) == 2


async def test_a_file_over_the_limit_of_waiting_lines_fails(world):
    world.settings = replace(world.settings, max_unfinished_lines=4)
    await world.submit(new_batch(2))
    record = await world.validate(file_of(line("a"), line("b"), line("c")))
    [error] = record.errors
    assert (record.status, error.code) == (BatchStatus.FAILED, "max_lines_per_tenant")
    assert "has 3 lines, and 2 requests of other batches" in error.message and "the limit is 4" in error.message
    assert await world.write(lambda c: delete_lines(c, record.id, 10)) == 0


async def test_a_late_writer_does_not_replace_the_files(world):
    lost = await world.run(250)
    await world.write(lambda c: reap_owner(c, OWNER))
    await world.add_owner(OWNER)
    await world.finalize(await world.claim(OWNER, *CLOSING))
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
