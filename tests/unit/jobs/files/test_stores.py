"""Files by id: whole or absent, streamed, on disk and in a store that has no directories."""

import asyncio
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import fsspec
import pytest

from replicas.timing.clock import Clock
from serve_app.jobs.api.errors import UnknownFile
from serve_app.jobs.files.store import PART_BYTES, FileStore, FsspecStore, in_parts_of

MIB = 2**20


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "deep" / "files"
    urls = {"path": str(folder), "file": f"file://{folder}", "memory": f"memory://{tmp_path.name}/files"}
    yield urls[request.param]
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store(url: str) -> FsspecStore:
    return FsspecStore(url)


async def stream(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(store: FileStore, file_id: str) -> bytes:
    return b"".join([part async for part in store.read(file_id)])


async def test_what_was_written_is_read(url: str, store: FileStore) -> None:
    data = os.urandom(2 * MIB + 5)
    assert await store.write("file-1_a", stream(data[:7], b"", data[7:])) == len(data)
    assert [len(part) async for part in store.read("file-1_a")] == [MIB, MIB, 5]
    assert await content(FsspecStore(url), "file-1_a") == data


async def test_an_empty_file_is_a_file(store: FsspecStore) -> None:
    assert await store.write("empty", stream()) == 0
    assert await content(store, "empty") == b""


async def test_a_file_is_replaced_and_deleted(store: FsspecStore) -> None:
    await store.write("file", stream(b"first"))
    await store.write("file", stream(b"second, longer"))
    assert await content(store, "file") == b"second, longer"
    await store.delete("file")
    await store.delete("file")
    with pytest.raises(UnknownFile):
        await content(store, "file")


async def test_an_unknown_file_raises_unknown_file(store: FsspecStore) -> None:
    with pytest.raises(UnknownFile):
        await content(store, "file")


@pytest.mark.parametrize("file_id", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a.b", "a\0b", "x\n", "ä", "a" * 201])
async def test_an_id_never_names_a_path_outside_the_store(tmp_path: Path, file_id: str) -> None:
    store = FsspecStore(str(tmp_path / "files"))
    with pytest.raises(UnknownFile):
        await store.write(file_id, stream(b"x"))
    with pytest.raises(UnknownFile):
        await content(store, file_id)
    with pytest.raises(UnknownFile):
        await store.delete(file_id)
    assert list(tmp_path.iterdir()) == []


async def test_a_file_shows_only_when_whole(store: FsspecStore) -> None:

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(PART_BYTES)
            with pytest.raises(UnknownFile):
                await content(store, "file")

    await store.write("file", parts())
    assert len(await content(store, "file")) == 3 * PART_BYTES


@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_a_file_that_is_not_finished_leaves_nothing(store: FsspecStore, how: str) -> None:
    await store.write("file", stream(b"earlier"))
    waiting = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield bytes(2 * PART_BYTES)
        if how == "fails":
            raise OSError("the client went away")
        waiting.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(store.write("file", parts()))
    if how == "cancelled":
        await waiting.wait()
        writing.cancel()
    with pytest.raises(OSError if how == "fails" else asyncio.CancelledError):
        await writing
    assert await content(store, "file") == b"earlier"
    assert await store.delete_unfinished(-60) == 0


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
async def test_cancelling_at_any_moment_leaves_a_whole_file_or_none(tmp_path: Path, num_cancels: int) -> None:
    store = FsspecStore(str(tmp_path))
    data = bytes(PART_BYTES)
    for num_turns in range(12):
        writing = asyncio.create_task(store.write(f"file-{num_turns}", stream(data, data)))
        for _ in range(num_turns):
            await asyncio.to_thread(lambda: None)
        for _ in range(num_cancels):
            writing.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([writing])
        path = tmp_path / f"file-{num_turns}"
        assert not path.exists() or path.stat().st_size == 2 * PART_BYTES
        assert list(tmp_path.glob(".unfinished/*")) == []


async def test_writers_of_one_name_do_not_mix(store: FsspecStore) -> None:
    contents = [bytes([number]) * (PART_BYTES + number) for number in range(8)]
    await asyncio.gather(*(store.write("file", stream(data[:9], data[9:])) for data in contents))
    assert await content(store, "file") in contents


async def test_readers_of_one_file_do_not_disturb_each_other(store: FsspecStore) -> None:
    data = os.urandom(3 * MIB)
    await store.write("file", stream(data))
    assert await asyncio.gather(*(content(store, "file") for _ in range(4))) == [data] * 4


async def test_streaming_takes_constant_memory(tmp_path: Path) -> None:
    store = FsspecStore(str(tmp_path))
    num_parts, part = 1600, os.urandom(2**16)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(num_parts):
            yield part

    tracemalloc.start()
    try:
        assert await store.write("large", parts()) == 100 * MIB
        num_read = 0
        async for read in store.read("large"):
            num_read += len(read)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_read == 100 * MIB
    assert peak_bytes < 8 * MIB


async def test_a_reader_may_leave_early(store: FsspecStore) -> None:
    await store.write("file", stream(bytes(2 * MIB)))
    async with aclosing(store.read("file")) as parts:
        async for part in parts:
            assert len(part) == MIB
            break


CRASH = """
import asyncio, sys
from serve_app.jobs.files.store import FsspecStore

async def parts():
    yield bytes(3 * 2**20)
    print("half", flush=True)
    await asyncio.Event().wait()

asyncio.run(FsspecStore(sys.argv[1]).write("file", parts()))
"""


async def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CRASH, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    now_s = 0.0
    store = FsspecStore(str(tmp_path), clock=Clock(unix=lambda: now_s))
    with pytest.raises(UnknownFile):
        await content(store, "file")
    [half] = tmp_path.glob(".unfinished/*")
    now_s = int(half.name.split(".")[0]) + 60
    assert await store.delete_unfinished(older_than_s=60) == 0
    now_s += 1
    assert await store.delete_unfinished(older_than_s=60) == 1
    assert list(tmp_path.glob(".unfinished/*")) == []


async def test_nobody_else_on_the_machine_reads_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "files"
    await FsspecStore(str(folder)).write("file", stream(b"x"))
    assert folder.stat().st_mode & 0o077 == 0


def test_a_url_of_an_unknown_scheme_is_refused_at_once() -> None:
    with pytest.raises(ValueError):
        FsspecStore("nowhere://x")


async def test_parts_are_put_together_and_taken_apart() -> None:
    parts = [b"", b"abc", b"d", b"efghijklm", b"", b"n"]
    assert [part async for part in in_parts_of(4, stream(*parts))] == [b"abcd", b"efgh", b"ijkl", b"mn"]
