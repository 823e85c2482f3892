"""Several workers on one PostgreSQL, which die in any order: nothing is lost, and nothing is done twice."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import pytest
from sqlalchemy import select

from replicas.protocol import Band
from serve_app.jobs.api.errors import BatchNotCancellable
from serve_app.jobs.api.records import BatchKind, BatchRecord, BatchStatus, FileRecord, JobsSettings, RequestCounts
from serve_app.jobs.files.store import FsspecStore
from serve_app.jobs.lifecycle.line_size import sized
from serve_app.jobs.storage.lines import new_rows
from serve_app.jobs.storage.rows.batches import batch_record, select_batch
from serve_app.jobs.storage.rows.files import add_file
from serve_app.jobs.storage.schema.database import Database
from serve_app.jobs.storage.schema.tables import batches
from serve_app.jobs.storage.submission import submit_batch
from testkit.jobs.database_worlds import ENDPOINT, MODEL, body, check_invariants, new_batch
from testkit.jobs.jobs_process import Process, ScriptedCompletions, jobs_process
from testkit.jobs.memory_files import MemoryFiles
from testkit.jobs.postgresql import PostgreSQL
from testkit.jobs.webhook_receivers import Received, receiving, status
from testkit.limits import LIMIT_S, until
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated

TENANT = "acme"
QUICK = JobsSettings(MODEL, job_lease_s=0.3)


@pytest.fixture
def shared_url(postgresql_server: PostgreSQL) -> Iterator[str]:
    """Yield the URL of an empty database that several workers may share."""
    with postgresql_server.fresh_database() as url:
        yield url


@pytest.fixture
def completions() -> ScriptedCompletions:
    completions = ScriptedCompletions()
    completions.gate.set()
    return completions


def file_of(num_lines: int) -> bytes:
    each = ({"custom_id": f"id-{n}", "method": "POST", "url": ENDPOINT, "body": body(n)} for n in range(num_lines))
    return "\n".join(map(json.dumps, each)).encode()


async def submit_file(process: Process, files: MemoryFiles, num_lines: int, **fields: Any) -> BatchRecord:
    file_id = f"file-{len(files.files)}"
    files.files[file_id] = file_of(num_lines)
    await process.service.add_file(FileRecord(file_id, TENANT, "batch", "in.jsonl", 1, 1.0))
    record: BatchRecord = (await process.service.submit(new_batch(kind=BatchKind.FILE, input_file_id=file_id))).batch
    return record


class Workers:
    """Workers in one process, each with a database connection and replicas of its own."""

    def __init__(self, url: str, completions: ScriptedCompletions, num_slots: int = 4) -> None:
        self.files = MemoryFiles()
        self._url = url
        self._completions = completions
        self._num_slots = num_slots
        self._running: list[tuple[Process, contextlib.AsyncExitStack]] = []

    @contextlib.asynccontextmanager
    async def started(self, number: int) -> AsyncIterator["Workers"]:
        try:
            for _ in range(number):
                await self.start()
            yield self
        finally:
            while self._running:
                await self._running.pop()[1].aclose()

    async def start(self, is_killed: bool = False) -> Process:
        stack = contextlib.AsyncExitStack()
        process = await stack.enter_async_context(
            jobs_process(
                self._url, self.files, self._completions, num_slots=self._num_slots, settings=QUICK,
                is_killed=is_killed,
            )
        )  # fmt: skip
        self._running.append((process, stack))
        return process

    async def end(self, at: int) -> None:
        """End a worker: in order, or, if it was started so, as if it were killed."""
        await self._running.pop(at)[1].aclose()

    @property
    def processes(self) -> list[Process]:
        return [process for process, _ in self._running]

    def any(self, rng: random.Random) -> Process:
        return rng.choice(self.processes)


@pytest.mark.random_worlds(6)
async def test_workers_that_die_in_any_order_answer_every_line_once(
    shared_url: str, completions: ScriptedCompletions, seeds: Seeds
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        async with Workers(shared_url, completions).started(1) as workers:
            records = [await _submit_any(rng, workers.any(rng), workers.files) for _ in range(6)]
            for _ in range(8):
                await rng.choice([workers.start, lambda: workers.start(is_killed=True)])()
                if rng.random() < 0.3:
                    with contextlib.suppress(BatchNotCancellable):
                        await workers.any(rng).service.cancel(TENANT, rng.choice(records).id)
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                if len(workers.processes) > 3:
                    await workers.end(rng.randrange(len(workers.processes)))
            for record in records:
                ended = await workers.any(rng).service.wait(TENANT, record.id, LIMIT_S)
                await _check_outcome(workers, ended)
            await workers.processes[0].database.read(check_invariants)


async def _submit_any(rng: random.Random, process: Process, files: MemoryFiles) -> BatchRecord:
    kind = rng.choice(list(BatchKind))
    if kind is BatchKind.FILE:
        return await submit_file(process, files, rng.randrange(1, 60))
    number = 1 if kind is BatchKind.JOB else rng.randrange(1, 60)
    record: BatchRecord = (await process.service.submit(new_batch(number, kind))).batch
    return record


async def _check_outcome(workers: Workers, record: BatchRecord) -> None:
    """Every line of a batch is there once, and the counts say so."""
    assert record.status.is_final
    if record.kind is not BatchKind.FILE:
        shown = await workers.processes[0].service.lines(TENANT, record.id, -1, 100)
        assert [line.index for line in shown] == list(range(record.counts.total))
        return
    parts = [workers.files.files[each] for each in (record.output_file_id, record.error_file_id) if each is not None]
    counts = Counter(json.loads(line)["custom_id"] for part in parts for line in part.splitlines())
    assert counts == {f"id-{n}": 1 for n in range(record.counts.total)}
    assert record.counts.completed + record.counts.failed == record.counts.total


async def test_any_worker_answers_for_what_another_one_does(shared_url: str, completions: ScriptedCompletions) -> None:
    completions.gate.clear()
    async with Workers(shared_url, completions).started(3) as workers:
        first, second, third = (process.service for process in workers.processes)
        batch = (await first.submit(new_batch(40))).batch
        await until(lambda: completions.num_running >= 4)
        waiting = asyncio.create_task(second.wait(TENANT, batch.id, LIMIT_S))
        assert (await second.batch(TENANT, batch.id)).status is BatchStatus.IN_PROGRESS
        await third.cancel(TENANT, batch.id)
        assert (await waiting).status is BatchStatus.CANCELLED
        await until(lambda: completions.num_running == 0)


async def test_tenants_are_served_alike_over_all_workers(shared_url: str, completions: ScriptedCompletions) -> None:
    completions.gate.clear()
    async with Workers(shared_url, completions, num_slots=2).started(2) as workers:
        processes = workers.processes
        await until(lambda: all(process.backlog.num_workers == 2 for process in processes))
        for tenant in ("a", "b", "c", "d"):
            await processes[0].service.submit(new_batch(50, tenant=tenant))
        completions.gate.set()
        await until(lambda: len(completions.callers) >= 80)
        tenants = Counter(caller.principal.tenant for caller in completions.callers[:80])
    assert set(tenants) == {"a", "b", "c", "d"}


async def test_urgent_jobs_pass_background_work_that_other_workers_hold(
    shared_url: str, completions: ScriptedCompletions
) -> None:
    completions.gate.clear()
    async with Workers(shared_url, completions).started(3) as workers:
        first, *_ = workers.processes
        await first.service.submit(new_batch(200))
        await until(lambda: completions.num_running >= 4)
        await workers.processes[2].service.submit(new_batch(1, BatchKind.JOB, band=Band.INTERACTIVE))
        await until(lambda: Band.INTERACTIVE in {caller.requested_band for caller in completions.callers})
        assert len(completions.asked) < 100


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
async def test_20_kills_of_workers_and_of_the_batchs_owner_lose_nothing(
    shared_url: str, tmp_path: Path, seed: int
) -> None:
    num_lines, rng = 3000, random.Random(seed)
    (tmp_path / "owners").mkdir()
    database = Database.opened(shared_url)
    async with receiving(status(200)) as receiver:
        batch_ids = await _submit(database, tmp_path, num_lines, f"http://127.0.0.1:{receiver.port}/hook")
        workers = [_start(shared_url, tmp_path) for _ in range(4)]
        try:
            for kill in range(20):
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                owner = await database.read(lambda c: c.execute(_OWNER_OF_A_BATCH).scalar())
                victim = _with_id(workers, tmp_path, owner) if kill % 2 and owner else None
                victim = victim or rng.choice(workers)
                victim.kill()
                victim.wait()
                workers[workers.index(victim)] = _start(shared_url, tmp_path)
            for batch_id in batch_ids:
                await _ended(database, batch_id)
            await _check_files(database, tmp_path, batch_ids[0], num_lines)
            await database.read(check_invariants)
            await until(lambda: {_subject(each) for each in receiver.requests} == set(batch_ids))
            assert len({each.headers["webhook-id"] for each in receiver.requests}) == len(batch_ids)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            database.close()


_OWNER_OF_A_BATCH = select(batches.c.owner).where(batches.c.owner.is_not(None)).limit(1)


def _start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "testkit.jobs.worker", url, str(folder), "8"])


def _with_id(workers: list[subprocess.Popen[bytes]], folder: Path, owner: str) -> subprocess.Popen[bytes] | None:
    path = folder / "owners" / owner
    pid = int(path.read_text() or 0) if path.exists() else 0
    return next((worker for worker in workers if worker.pid == pid), None)


async def _submit(database: Database, folder: Path, num_lines: int, url: str) -> list[str]:
    """Submit a batch of a file, and 30 jobs; return their ids."""
    settings = JobsSettings(MODEL)

    async def parts() -> AsyncIterator[bytes]:
        yield file_of(num_lines)

    num_bytes = await FsspecStore(str(folder / "files")).write("file-in", parts())
    record = FileRecord("file-in", TENANT, "batch", "in.jsonl", num_bytes, 1.0)
    await database.write(lambda c: add_file(c, record))
    of_file = new_batch(kind=BatchKind.FILE, input_file_id="file-in", callback_url=url)
    new = {"batch_0": of_file, **{f"job_{n}": new_batch(1, BatchKind.JOB, callback_url=url) for n in range(1, 31)}}
    for batch_id, each in new.items():
        rows = new_rows(batch_id, sized(each.endpoint, each.lines))
        await database.write(
            partial(submit_batch, new=each, batch_id=batch_id, rows=rows, settings=settings, now=time())
        )
    return list(new)


async def _ended(database: Database, batch_id: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            row = await database.read(lambda c: select_batch(c, batch_id))
            if BatchStatus(row.status).is_final:
                assert row.status == BatchStatus.COMPLETED.value
                return
            await asyncio.sleep(0.1)


async def _check_files(database: Database, folder: Path, batch_id: str, num_lines: int) -> None:
    record = batch_record(await database.read(lambda c: select_batch(c, batch_id)))
    assert (record.counts, record.error_file_id) == (RequestCounts(num_lines, num_lines, 0), None)
    output = (folder / "files" / str(record.output_file_id)).read_bytes()
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in range(num_lines)]
    assert all(answer["response"]["body"] == {"text": f"prompt {n}"} for n, answer in enumerate(answers))


def _subject(received: Received) -> str:
    return str(json.loads(received.body)["data"]["id"])
