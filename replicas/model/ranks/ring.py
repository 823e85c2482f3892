"""Ring in shared memory: one process writes messages, others read all of them and answer each step with a digest."""

from __future__ import annotations

import mmap
import os
import select
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass

_CAPACITY = 4 * 2**20
_WORD = 8
_SPIN_S = 200e-6
"""Longest time for which a reader polls without sleep, seconds."""
_WRITE_LIMIT_S = 60.0
_PAUSE_S = 50e-6
_LONGEST_SLEEP_S = 0.05
_MOST_PIECE_BYTES = 2**20
_HALF = 0xFFFFFFFF
_NUM_DIGESTS = 64
"""Steps whose digests a reader keeps: more than are ever in flight."""
_READ, _SLEEPS, _DIGESTS = 0, 1, 2
"""Words of a reader: bytes that it has read, 1 while it sleeps, and digests with the numbers of their steps above."""
_WORDS_PER_READER = 2 + _NUM_DIGESTS


class RankLost(Exception):
    """Another rank does not answer, or computes something else: the model cannot be computed any more."""


@dataclass(frozen=True, slots=True)
class RingFiles:
    """File descriptors of a ring: its memory, and the event that wakes each reader."""

    memory: int
    events: tuple[int, ...]

    @classmethod
    def create(cls, num_readers: int) -> RingFiles:
        """Create an empty ring. Its memory is free once every process that has the descriptors has ended."""
        memory = os.memfd_create("headway-ring")
        os.ftruncate(memory, _header_bytes(num_readers) + _CAPACITY)
        return cls(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_readers)))

    def close(self) -> None:
        """Close the descriptors; rings that are mapped stay."""
        for descriptor in (self.memory, *self.events):
            os.close(descriptor)


def _header_bytes(num_readers: int) -> int:
    return mmap.PAGESIZE * -(-_WORD * (1 + num_readers * _WORDS_PER_READER) // mmap.PAGESIZE)


def _end_of_piece(start: int, size: int) -> int:
    """Return the position after a piece of `size` bytes, and its word, that begins at `start`."""
    return start + _WORD * (1 - -size // _WORD)


class _Mapping:
    """Memory of a ring: the number of bytes ever written, the readers' words, and the last bytes.

    These are pieces of messages. Each begins at a multiple of the size of a word, with a word of its own.
    """

    def __init__(self, files: RingFiles) -> None:
        header = _header_bytes(len(files.events))
        # All pages are there from the start: a step does not wait for one.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = memoryview(mmap.mmap(files.memory, header + _CAPACITY, flags=flags))
        self.words = memory.cast("Q")
        self._data, self._first_data_word = memory[header:], header // _WORD

    def first_word(self, reader: int) -> int:
        """Return the index of a reader's first word."""
        return 1 + reader * _WORDS_PER_READER

    def word_at(self, position: int) -> int:
        """Return the index of the word at a position."""
        return self._first_data_word + position % _CAPACITY // _WORD

    def put(self, start: int, values: bytes) -> None:
        """Write bytes from position `start` on."""
        place = start % _CAPACITY
        first = min(len(values), _CAPACITY - place)
        self._data[place : place + first] = values[:first]
        if first < len(values):
            self._data[: len(values) - first] = values[first:]

    def get(self, start: int, size: int) -> bytearray:
        """Return a copy of the `size` bytes from position `start` on."""
        place = start % _CAPACITY
        first = min(size, _CAPACITY - place)
        values = bytearray(self._data[place : place + first])
        return values if first == size else values + self._data[: size - first]


class RingWriter:
    """Writer of a ring. A message of any length goes through it, in pieces."""

    def __init__(self, files: RingFiles) -> None:
        self._mapping = _Mapping(files)
        self._first_words = [self._mapping.first_word(reader) for reader in range(len(files.events))]
        self._sleeps = [(first + _SLEEPS, event) for first, event in zip(self._first_words, files.events, strict=True)]
        """Of each reader the word that tells whether it sleeps, and the event that wakes it."""
        self._free_until = 0
        """Position up to which all readers were seen to leave room."""

    def write(self, message: bytes) -> None:
        """Write a message for all readers.

        Raises:
            RankLost: a reader has left the ring full for a minute.
        """
        for start in range(0, len(message), _MOST_PIECE_BYTES):
            end = start + _MOST_PIECE_BYTES
            self._write_piece(message[start:end], is_last=end >= len(message))

    def digests(self, step: int, limit_s: float) -> list[int]:
        """Return each reader's digest of a step, once they have written it.

        Raises:
            RankLost: one of them has not, for `limit_s` seconds.
        """
        return [self._digest(reader, step, limit_s) for reader in range(len(self._first_words))]

    def _digest(self, reader: int, step: int, limit_s: float) -> int:
        words, word = self._mapping.words, self._first_words[reader] + _DIGESTS + step % _NUM_DIGESTS
        begun_s = time.monotonic()
        while words[word] >> 32 != step & _HALF:
            waited_s = time.monotonic() - begun_s
            if waited_s > limit_s:
                raise RankLost(f"rank {reader + 1} has not ended step {step} for {limit_s:.0f} s")
            time.sleep(0.0 if waited_s < _SPIN_S else _PAUSE_S)
        return words[word] & _HALF

    def _write_piece(self, piece: bytes, *, is_last: bool) -> None:
        words = self._mapping.words
        start = words[0]
        end = _end_of_piece(start, len(piece))
        if end > self._free_until:
            self._wait_for_room(end)
        words[self._mapping.word_at(start)] = (len(piece) << 1 | is_last) << 32 | zlib.crc32(piece)
        self._mapping.put(start + _WORD, piece)
        words[0] = end
        for word, event in self._sleeps:
            if words[word]:
                os.eventfd_write(event, 1)

    def _wait_for_room(self, end: int) -> None:
        """Wait until all readers have read what is in the place of the bytes up to position `end`."""
        words, begun_s = self._mapping.words, time.monotonic()
        while (free_until := min(words[first + _READ] for first in self._first_words) + _CAPACITY) < end:
            if time.monotonic() - begun_s > _WRITE_LIMIT_S:
                raise RankLost(f"a rank has read nothing for {_WRITE_LIMIT_S:.0f} s")
            time.sleep(_PAUSE_S)
        self._free_until = free_until


class RingReader:
    """Reader of a ring: it polls for a short time, then sleeps until the writer wakes it."""

    def __init__(self, files: RingFiles, reader: int) -> None:
        self._mapping = _Mapping(files)
        self._first_word = self._mapping.first_word(reader)
        self._event = files.events[reader]
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def read(self, limit_s: float) -> bytearray | None:
        """Return a copy of the next message; None: there is none for `limit_s` seconds.

        Raises:
            RankLost: the rest of a message does not follow.
        """
        if not self._waited(limit_s):
            return None
        message, is_last = self._take_piece()
        while not is_last:
            if not self._waited(_WRITE_LIMIT_S):
                raise RankLost(f"the rest of a message did not follow for {_WRITE_LIMIT_S:.0f} s")
            piece, is_last = self._take_piece()
            message += piece
        return message

    def answer(self, step: int, digest: int) -> None:
        """Write the digest, a number of 32 bits, of a step's tokens."""
        self._mapping.words[self._first_word + _DIGESTS + step % _NUM_DIGESTS] = (step & _HALF) << 32 | digest

    def _num_available(self) -> int:
        words = self._mapping.words
        return words[0] - words[self._first_word + _READ]

    def _waited(self, limit_s: float) -> bool:
        """Wait for bytes; return False if there are none for `limit_s` seconds."""
        begun_s = time.monotonic()
        while not self._num_available():
            waited_s = time.monotonic() - begun_s
            if waited_s >= limit_s:
                return False
            if waited_s < _SPIN_S:
                time.sleep(0.0)
            else:
                self._sleep(limit_s - waited_s)
        return True

    def _sleep(self, limit_s: float) -> None:
        words, sleeps = self._mapping.words, self._first_word + _SLEEPS
        words[sleeps] = 1
        if not self._num_available():
            # The writer may not see yet that the reader sleeps, so no sleep is long.
            self._poll.poll(1000 * min(limit_s, _LONGEST_SLEEP_S))
        words[sleeps] = 0
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def _take_piece(self) -> tuple[bytearray, bool]:
        """Return the next piece, and whether the message ends with it.

        Some processors show the writer's count before its bytes. The bytes are whole when their checksum is right.
        """
        words, read = self._mapping.words, self._first_word + _READ
        start, begun_s = words[read], time.monotonic()
        while True:
            head = words[self._mapping.word_at(start)]
            size = head >> 33
            if size <= _MOST_PIECE_BYTES:
                piece = self._mapping.get(start + _WORD, size)
                if zlib.crc32(piece) == head & _HALF:
                    words[read] = _end_of_piece(start, size)
                    return piece, bool(head >> 32 & 1)
            if time.monotonic() - begun_s > _WRITE_LIMIT_S:
                raise RankLost(f"a message was not whole for {_WRITE_LIMIT_S:.0f} s")
