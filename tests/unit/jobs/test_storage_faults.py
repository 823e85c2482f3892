"""Storage that is full, read-only, damaged or away: 503 for jobs, nothing lost, and the process goes on by itself."""

import asyncio
import contextlib
import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from serve_app.jobs import runtime as runtime_module
from serve_app.jobs.api.errors import StorageUnavailable
from serve_app.jobs.api.records import BatchKind, BatchRecord, JobsSettings
from serve_app.jobs.files.store import FsspecStore
from serve_app.jobs.storage.schema.database import Database
from testkit.jobs.database_worlds import MODEL, new_batch
from testkit.jobs.jobs_process import Process, ScriptedCompletions, jobs_process
from testkit.jobs.memory_files import MemoryFiles
from testkit.limits import LIMIT_S, until

QUICK = JobsSettings(MODEL, job_lease_s=0.3)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(runtime_module, "_MAX_PAUSE_S", 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite3"


@pytest.fixture
def completions() -> ScriptedCompletions:
    return ScriptedCompletions()


@pytest.fixture
async def process(path: Path, completions: ScriptedCompletions) -> AsyncIterator[Process]:
    async with jobs_process(f"sqlite:///{path}", MemoryFiles(), completions, settings=QUICK) as process:
        yield process


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Let no file of this process grow, as on a full disk: the kernel refuses what lies beyond the limit."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


async def submit(process: Process, num_lines: int = 3) -> BatchRecord:
    record: BatchRecord = (await process.service.submit(new_batch(num_lines, kind=BatchKind.PROMPTS))).batch
    return record


async def ended(process: Process, batch: BatchRecord) -> BatchRecord:
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(StorageUnavailable):
                record: BatchRecord = await process.service.wait(batch.tenant, batch.id, 1.0)
                if record.status.is_final:
                    return record
            await asyncio.sleep(0.02)


async def test_a_full_disk_refuses_new_work_and_loses_none(path, process, completions):
    accepted = await submit(process)
    await until(lambda: completions.num_running == 3)
    with full_disk(path):
        with pytest.raises(StorageUnavailable) as refusal:
            await submit(process)
        assert refusal.value.code in ("storage_full", "storage_unavailable") and refusal.value.retry_after_s
        completions.gate.set()
        await until(lambda: completions.num_running == 0)
        await until(lambda: process.database.fault is not None)
        await asyncio.sleep(0.3)
        process.runtime.check_health()
        metrics = {metric.name: metric.value for metric in await process.runtime.metrics({})}
        assert metrics["headway:jobs_storage_up"] == 0.0
    record = await ended(process, accepted)
    assert (record.counts.total, record.counts.completed, record.counts.failed) == (3, 3, 0)
    assert (await ended(process, await submit(process))).counts.completed == 3


async def test_a_damaged_database_stops_jobs_alone_until_it_is_restored(path, process, completions):
    accepted = await submit(process)
    completions.gate.set()
    await ended(process, accepted)
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite3.connect(f"{path}.copy")) as copy,
    ):
        source.backup(copy)
    damage(path)
    await until(lambda: process.database.fault == "storage_unavailable")
    with pytest.raises(StorageUnavailable):
        await submit(process)
    process.runtime.check_health()
    restore(path)
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(StorageUnavailable):
                later = await submit(process)
                break
            await asyncio.sleep(0.02)
    assert (await ended(process, later)).counts.completed == 3
    assert (await process.service.batch(accepted.tenant, accepted.id)).status.is_final


async def test_a_process_waits_while_the_database_is_damaged(path, completions):
    Database.opened(f"sqlite:///{path}").close()
    path.rename(f"{path}.copy")
    path.write_bytes(os.urandom(20_000))
    completions.gate.set()
    async with jobs_process(f"sqlite:///{path}", MemoryFiles(), completions, settings=QUICK) as process:
        assert process.database.fault == "storage_unavailable"
        with pytest.raises(StorageUnavailable):
            await submit(process)
        process.runtime.check_health()
        restore(path)
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(StorageUnavailable):
                    assert (await ended(process, await submit(process))).counts.completed == 3
                    return
                await asyncio.sleep(0.02)


def damage(path: Path) -> None:
    """Overwrite the whole database and what SQLite keeps beside it."""
    for each in (path, Path(f"{path}-wal")):
        size = each.stat().st_size
        with each.open("r+b") as file:
            file.write(b"\xde\xad" * (size // 2))


def restore(path: Path) -> None:
    for name in (path, f"{path}-wal", f"{path}-shm"):
        Path(name).unlink(missing_ok=True)
    Path(f"{path}.copy").rename(path)


async def test_mistakes_in_a_transaction_are_no_faults_of_the_storage(path):
    database = Database.opened(f"sqlite:///{path}")
    with pytest.raises(Exception, match="no such table") as raised:
        await database.read(lambda connection: connection.execute(text("SELECT 1 FROM nowhere")))
    database.close()
    assert not isinstance(raised.value, StorageUnavailable) and database.fault is None


async def test_a_file_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path):
    store = FsspecStore(str(tmp_path / "files"))

    async def parts() -> Any:
        for _ in range(3):
            yield bytes(2**20)

    with full_disk(tmp_path), pytest.raises(StorageUnavailable) as refusal:
        await store.write("file-1", parts())
    assert refusal.value.code in ("storage_full", "storage_unavailable")
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


async def test_a_fault_is_over_with_the_next_write_and_not_before(path):
    now_s = 0.0
    database = Database(f"sqlite:///{path}", lambda: now_s)
    database.open()

    async def write() -> None:
        await database.write(lambda c: c.execute(text("INSERT INTO owners (id, heartbeat_unix_s) VALUES (1, 2)")))

    with full_disk(path), pytest.raises(StorageUnavailable):
        await write()
    now_s = 100.0
    await database.read(lambda connection: connection.execute(text("SELECT * FROM owners")).all())
    assert database.fault is not None
    await write()
    assert database.fault is None
    database.close()


async def test_a_fault_beside_writes_that_succeed_is_shown_for_some_seconds(path):
    now_s = 0.0
    database = Database(f"sqlite:///{path}", lambda: now_s)
    database.open()
    with full_disk(path), pytest.raises(StorageUnavailable):
        await database.write(lambda c: c.execute(text("CREATE TABLE large (number INTEGER)")))
    await database.write(lambda c: c.execute(text("INSERT INTO owners (id, heartbeat_unix_s) VALUES (1, 2)")))
    now_s = 1.5
    assert database.fault is not None
    now_s = 2.5
    assert database.fault is None
    database.close()


async def test_a_read_only_database_is_read_and_refuses_writes(path):
    Database.opened(f"sqlite:///{path}").close()
    database = Database(f"sqlite:///file:{path}?mode=ro&uri=true")
    assert await database.read(lambda connection: connection.execute(text("SELECT count(*) FROM lines")).scalar()) == 0
    with pytest.raises(StorageUnavailable) as refusal:
        await database.write(lambda connection: connection.execute(text("DELETE FROM lines")))
    database.close()
    assert refusal.value.code == "storage_unavailable" and database.fault is not None
