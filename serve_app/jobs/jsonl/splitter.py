"""Splitting of a streamed file into lines, with memory bounded by one part and one line."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """Line that is not blank, without the white space around it."""

    number: int
    """Number of the line, from 1; blank lines count."""
    data: bytes


class LineTooLong(Exception):
    """Error for a line that is longer than the limit; `number` is the line's, from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def split_lines(parts: AsyncIterator[bytes], max_line_bytes: int) -> AsyncGenerator[list[RawLine], None]:
    """Yield the lines that end in each part, in order; a list may be empty.

    Raises:
        LineTooLong: a line has more than `max_line_bytes`; the file is not read further.
    """
    rest, number = b"", 0
    async for part in parts:
        pieces = (rest + part).split(b"\n")
        rest = pieces.pop()
        lines = []
        for piece in pieces:
            number += 1
            if (line := _line(piece, number, max_line_bytes)) is not None:
                lines.append(line)
        if len(rest) > max_line_bytes:
            raise LineTooLong(number + 1)
        yield lines
    last = _line(rest, number + 1, max_line_bytes)
    yield [] if last is None else [last]


def _line(data: bytes, number: int, max_line_bytes: int) -> RawLine | None:
    if number == 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    data = data.strip()
    if len(data) > max_line_bytes:
        raise LineTooLong(number)
    return RawLine(number, data) if data else None
