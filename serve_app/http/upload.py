"""Upload of one file as multipart/form-data, read in pieces as they arrive and never held whole."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

from python_multipart.multipart import parse_options_header

from replicas.errors import InvalidRequest
from serve_app.errors import body_too_large, shortened, unsupported_media_type
from serve_app.http.form_parser import FormEvent, FormParser, PartEnd, PartStart

FORM_BYTES = 2**16
"""Most bytes that a form may hold in addition to its file."""

_FIELD_BYTES = 64
"""Bytes that a field counts for in addition to its name and value."""
_FILE_FIELD = "file"
_MAX_FILENAME_CHARS = 512
_NESTED = re.compile(r"([a-z_]+)\[([a-z_]+)\]")


def boundary_of(content_type: str | None) -> bytes:
    """Return the boundary between the parts of a form.

    Raises:
        HttpError: 415, the content type is not multipart/form-data.
        InvalidRequest: the content type names no boundary.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise unsupported_media_type(content_type, "multipart/form-data")
    if not options.get(b"boundary"):
        raise InvalidRequest("the content type names no `boundary`")
    return options[b"boundary"]


class Upload:
    """Form with one file, named `file`, and a few short fields before and after the file.

    Call in this order: `open_file`, `content`, `fields`. All raise InvalidRequest if the form is malformed, and pass on
    the errors of `body`.
    """

    def __init__(self, body: AsyncGenerator[bytes, None], boundary: bytes, max_file_bytes: int) -> None:
        self._body = body
        self._parser = FormParser(boundary)
        self._max_file_bytes = max_file_bytes
        self._fields: dict[str, str] = {}
        self._num_field_bytes = 0
        self._has_ended = False

    async def open_file(self) -> str:
        """Read up to the file's first byte; return the file's name."""
        part = await self._read_fields()
        if part is None:
            raise InvalidRequest("`file` is missing", _FILE_FIELD, "missing_required_parameter")
        if part.name != _FILE_FIELD:
            raise InvalidRequest(f"`{shortened(part.name)}` is not supported; the file's field is `file`", part.name)
        filename = (part.filename or "").rpartition("/")[2]
        if not 0 < len(filename) <= _MAX_FILENAME_CHARS or not filename.isprintable():
            message = f"the file's name has {len(filename)} characters; it must be 1 to {_MAX_FILENAME_CHARS} printable"
            raise InvalidRequest(message, _FILE_FIELD)
        return filename

    async def content(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the file as they arrive.

        Raises:
            HttpError: 413, the file is larger than `max_file_bytes`.
            InvalidRequest: the file is empty.
        """
        num_bytes = 0
        while not isinstance(event := await self._next(), PartEnd):
            assert isinstance(event, bytes)
            num_bytes += len(event)
            if num_bytes > self._max_file_bytes:
                raise body_too_large(self._max_file_bytes, "the file")
            yield event
        if not num_bytes:
            raise InvalidRequest("`file` is empty", _FILE_FIELD)

    async def fields(self) -> dict[str, object]:
        """Read the rest of the form and return all fields; `a[b]` becomes the entry `b` of the object `a`."""
        if await self._read_fields() is not None:
            raise InvalidRequest("there is more than one file; send one at a time", _FILE_FIELD)
        fields: dict[str, object] = {}
        for name, value in self._fields.items():
            nested = _NESTED.fullmatch(name)
            if nested is None:
                fields[name] = value
                continue
            within = fields.setdefault(nested[1], {})
            if not isinstance(within, dict):
                raise InvalidRequest(f"`{nested[1]}` is given in two ways", nested[1])
            within[nested[2]] = value
        return fields

    async def _read_fields(self) -> PartStart | None:
        """Read fields up to the next file and return its start; None: the form has no more files."""
        while (event := await self._next()) is not None:
            assert isinstance(event, PartStart)
            if event.filename is not None:
                return event
            if event.name in self._fields:
                raise InvalidRequest(f"`{shortened(event.name)}` is given twice", shortened(event.name))
            self._count(len(event.name) + _FIELD_BYTES)
            self._fields[event.name] = await self._read_value()
        return None

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > FORM_BYTES:
            raise body_too_large(FORM_BYTES, "the form beside its file")

    async def _read_value(self) -> str:
        value = bytearray()
        while not isinstance(event := await self._next(), PartEnd):
            assert isinstance(event, bytes)
            value += event
            self._count(len(event))
        return value.decode(errors="replace")

    async def _next(self) -> FormEvent | None:
        """Return the next event of the form; None: the form has ended."""
        while not self._parser.events:
            if self._has_ended:
                if not self._parser.is_complete:
                    raise InvalidRequest("the form ends too early")
                return None
            part = await anext(self._body, None)
            self._has_ended = part is None
            if part is not None:
                self._parser.feed(part)
        return self._parser.events.popleft()
