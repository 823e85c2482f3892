"""The ring carries every message, of any length, to every reader in order, also to a reader that sleeps."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicas.model.ranks import ring
from replicas.model.ranks.ring import RankLost, RingFiles, RingReader, RingWriter

_LIMIT_S = 30.0


def test_messages_of_any_length_arrive_in_order() -> None:
    """Some are longer than the ring, and all together are several times its size."""
    rng = random.Random(0)
    lengths = [1, 7, 8, 100, 2**20, 2**20 + 1, 5 * 2**20, *(rng.randrange(1, 400_000) for _ in range(60))]
    messages = [rng.randbytes(length) for length in lengths]
    files = RingFiles.create(2)
    writer, readers = RingWriter(files), [RingReader(files, reader) for reader in range(2)]

    def read(reader: RingReader, pause_s: float) -> list[bytes | None]:
        found = []
        for _ in messages:
            found.append(reader.read(_LIMIT_S))
            time.sleep(pause_s)
        return found

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read, reader, pause_s) for reader, pause_s in zip(readers, (0.0, 0.002), strict=True)]
        for message in messages:
            writer.write(message)
        assert all(future.result() == messages for future in reading)
    files.close()


def test_a_sleeping_reader_is_woken() -> None:
    files = RingFiles.create(1)
    writer, reader = RingWriter(files), RingReader(files, 0)
    threading.Timer(0.2, writer.write, (b"one",)).start()
    assert reader.read(_LIMIT_S) == b"one"
    assert reader.read(0.01) is None
    files.close()


def test_a_digest_is_that_of_its_step() -> None:
    files = RingFiles.create(2)
    writer, readers = RingWriter(files), [RingReader(files, reader) for reader in range(2)]
    for step in range(1, 200):
        for number, reader in enumerate(readers):
            reader.answer(step, step * 7 + number)
        assert writer.digests(step, _LIMIT_S) == [step * 7, step * 7 + 1]
    readers[0].answer(200, 9)
    with pytest.raises(RankLost, match="rank 2 has not ended step 200 for 0 s"):
        writer.digests(200, 0.01)
    files.close()


def test_a_reader_that_reads_nothing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_WRITE_LIMIT_S", 0.05)
    files = RingFiles.create(1)
    writer = RingWriter(files)
    with pytest.raises(RankLost, match="a rank has read nothing"):
        writer.write(bytes(8 * 2**20))
    files.close()
