"""Lines of batches: the requests of a new one, on their way to the jobs process, and results on one line of a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

_LINE_BREAKS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


@dataclass(frozen=True, slots=True)
class NewLine:
    """Request of a new batch. An error in its body fails this line only."""

    custom_id: str
    body: dict[str, Any]


class NewLines(Sequence[NewLine]):
    """Requests of a batch. Pickled, they stay bytes until one is read, so a process hands them on cheaply.

    The bytes are those of two lists: pickling calls Python for each object of our classes.
    """

    def __init__(self, lines: Sequence[NewLine] = ()) -> None:
        self._lines = tuple(lines)
        self._num_lines = len(self._lines)
        self._packed: bytes | None = None

    @classmethod
    def unread(cls, packed: bytes, num_lines: int) -> NewLines:
        """Return the lines in pickled bytes."""
        lines = cls()
        lines._packed, lines._num_lines = packed, num_lines
        return lines

    def __reduce__(self) -> tuple[Callable[[bytes, int], NewLines], tuple[bytes, int]]:
        """Return the function from which another process makes the lines, and its arguments."""
        columns = [line.custom_id for line in self._lines], [line.body for line in self._lines]
        packed = self._packed or pickle.dumps(columns, pickle.HIGHEST_PROTOCOL)
        return NewLines.unread, (packed, self._num_lines)

    def __len__(self) -> int:
        return self._num_lines

    def __iter__(self) -> Iterator[NewLine]:
        return iter(self._read())

    @overload
    def __getitem__(self, index: int) -> NewLine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NewLine]: ...
    def __getitem__(self, index: int | slice) -> NewLine | Sequence[NewLine]:
        return self._read()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NewLines) and self._read() == other._read()

    __hash__ = None  # type: ignore[assignment]  # The bodies of lines have none.

    def _read(self) -> tuple[NewLine, ...]:
        if self._packed is not None:
            self._lines, self._packed = tuple(map(NewLine, *pickle.loads(self._packed))), None
        return self._lines


def on_one_line(text: bytes) -> bytes:
    """Return JSON without the characters that Python's and httpx's line readers, unlike JSON, treat as line breaks."""
    for character, escape in _LINE_BREAKS:
        text = text.replace(character, escape)
    return text
