"""Parsing of a multipart form into events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from replicas.errors import InvalidRequest

_MAX_HEADER_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class PartStart:
    """Start of a part of a form."""

    name: str
    filename: str | None
    """Name of the file; None: the part is a field, not a file."""


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of the current part of a form."""


FormEvent = PartStart | bytes | PartEnd
"""Event of a form; bytes are a piece of the current part's content."""


class FormParser:
    """Incremental parser from a form's bytes to events; all its errors are InvalidRequest."""

    def __init__(self, boundary: bytes) -> None:
        """Create the parser. The caller takes from `events`; `is_complete` becomes true at the form's last boundary."""
        self.events: deque[FormEvent] = deque()
        self.is_complete = False
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = ""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": lambda data, start, end: self.events.append(data[start:end]),
                    "on_part_end": lambda: self.events.append(PartEnd()),
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._start_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the form is malformed: {error}") from None

    def feed(self, data: bytes) -> None:
        """Parse the next bytes and append their events."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form is malformed: {error}") from None

    def _begin_part(self) -> None:
        self._disposition = ""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        if len(self._header_value) > _MAX_HEADER_BYTES:
            raise InvalidRequest("the form is malformed: a header is too long")

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value.decode("latin-1")
        self._header_name.clear()
        self._header_value.clear()

    def _start_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequest("the form is malformed: a part has no name")
        filename = options.get(b"filename")
        self.events.append(
            PartStart(
                options[b"name"].decode(errors="replace"),
                None if filename is None else filename.decode(errors="replace"),
            )
        )

    def _end(self) -> None:
        self.is_complete = True
