"""Request bodies, read with bounds on size and time: JSON bodies, and uploads of files in pieces as they arrive."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from replicas.errors import InvalidRequest, RequestAborted
from serve_app.errors import body_too_large, shortened, unsupported_media_type, upload_too_slow
from serve_app.http.exchange import caller_of, content_length, exchange_of
from serve_app.http.settings import IngressSettings
from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.parsing import BodyT, Converted, check_beginning, convert_fields, parse_body, read_fields
from serve_app.openai.request.sizes import JsonSize
from serve_app.openai.request.unknown_fields import CHAT_LEVEL, Level
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.tokenize.worker_threads import WorkerThreads

ResultT = TypeVar("ResultT")

_LARGE_BODY_BYTES = 2**14
"""Size from which a body is parsed in a thread, bytes. So small a body may still have 500 messages to validate."""

_PART_BYTES = 2**16
"""Size to which small pieces of a body are put together, bytes."""

FORM_BYTES = 2**16
"""Most bytes that a form may hold in addition to its file."""

_FIELD_BYTES = 64
"""Bytes that a field counts for in addition to its name and value."""
_FILE_FIELD = "file"
_MAX_HEADER_BYTES = 2**14
_MAX_FILENAME_CHARS = 512
_NESTED = re.compile(r"([a-z_]+)\[([a-z_]+)\]")


class BodyReader:
    """Reader of request bodies."""

    def __init__(self, settings: IngressSettings, workers: WorkerThreads) -> None:
        self._settings = settings
        self._workers = workers

    async def read(self, request: Request, schema: type[BodyT], ignored: IgnoredValues) -> BodyT:
        """Return the body as a `schema`; a field in `ignored` is accepted with the values listed there.

        Raises:
            HttpError: the body's content type is wrong, or the body is too large or too slow.
            InvalidRequest: the body is not a JSON object, has too many values, or does not match the schema.
            RequestAborted: the client left before the body was complete.
            Overloaded: too many large bodies wait.
            NoReplicaAvailable: the process that read the body has ended.
        """
        make = partial(parse_body, schema, ignored=ignored)
        return await self.convert(request, make, caller_of(request).owner_before_parsing)

    async def convert(
        self,
        request: Request,
        make: Callable[[dict[str, object]], ResultT],
        owner: WorkOwner,
        level: Level = CHAT_LEVEL,
    ) -> ResultT:
        """Return `make(fields)` for the body's fields, and note in the exchange those that are ignored.

        Fields that `level` does not know are ignored. `make` and its result are pickled where another process does the
        work.

        Raises:
            HttpError, InvalidRequest, RequestAborted, Overloaded, NoReplicaAvailable: as `read` does.
        """
        parts = await self._read_all(request, owner)
        work = partial(_converted, make, self._settings.limits, parts, level)
        converted = await self._workers.run_by_size(work, owner, sum(map(len, parts)), _LARGE_BODY_BYTES)
        exchange_of(request).ignored_fields = converted.ignored_fields
        return converted.value

    async def run_by_size(self, work: Callable[[], ResultT], owner: WorkOwner, num_bytes: int) -> ResultT:
        """Return the result of work on a body and on `num_bytes` that belong to it; a large one is not done here.

        Raises:
            Overloaded, NoReplicaAvailable: as `read` does.
        """
        return await self._workers.run_by_size(work, owner, num_bytes, _LARGE_BODY_BYTES)

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the body of any type and size in parts, as they arrive.

        Raises:
            HttpError: the client sends more slowly than `max_body_bytes` in `upload_timeout_s`, after a first
                `upload_timeout_s`.
            RequestAborted: the client left before the body was complete.
        """
        limit_s = self._settings.upload_timeout_s
        loop, parts = asyncio.get_running_loop(), request.stream()
        waited_s, num_bytes = 0.0, 0
        while True:
            # Only the wait for the client counts, not the consumer's time between the parts.
            asked_s = loop.time()
            try:
                async with asyncio.timeout(limit_s * (1 + num_bytes / self._settings.max_body_bytes) - waited_s):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise upload_too_slow(limit_s) from None
            except ClientDisconnect:
                raise RequestAborted("the client disconnected") from None
            waited_s += loop.time() - asked_s
            num_bytes += len(part)
            yield part

    async def _read_all(self, request: Request, owner: WorkOwner) -> tuple[bytes, ...]:
        """Return the body in the parts in which it arrives; refuse it as soon as it is known to be too large."""
        max_body_bytes, limit_s = self._settings.max_body_bytes, self._settings.upload_timeout_s
        content_type = request.headers.get("content-type")
        if (content_type or "").partition(";")[0].strip().lower() != "application/json":
            raise unsupported_media_type(content_type)
        if content_length(request.headers) > max_body_bytes:
            raise body_too_large(max_body_bytes)
        body, loop = _ArrivingBody(self._settings.limits), asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout(limit_s) as limit:
                async for part in request.stream():
                    body.add(part)
                    if body.num_bytes > max_body_bytes:
                        raise body_too_large(max_body_bytes)
                    if body.may_exceed():
                        asked_s = loop.time()
                        limit.reschedule(None)  # Only the wait for the client counts.
                        await self._check(body, owner)
                        limit_s += loop.time() - asked_s
                        limit.reschedule(started_s + limit_s)
        except TimeoutError:
            raise upload_too_slow(self._settings.upload_timeout_s) from None
        except ClientDisconnect:
            raise RequestAborted("the client disconnected") from None
        return body.all_parts()

    async def _check(self, body: _ArrivingBody, owner: WorkOwner) -> None:
        """Count the values in what has arrived of a body; a thread or a process does it."""
        check = partial(check_beginning, body.all_parts(), self._settings.limits)
        await self._workers.run_by_size(check, owner, body.num_bytes)


class _ArrivingBody:
    """JSON body that arrives in parts, with a bound of its values.

    The bound counts punctuation within strings, too, and takes little time. What has arrived is to be counted exactly
    when the bound exceeds the limits, and again each time that it has doubled.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.num_bytes = 0
        self._parts: list[bytes] = []
        self._rest = bytearray()
        self._limits = limits
        self._bound = JsonSize(0, 0)
        self._num_counted = 0
        self._times = 1

    def add(self, part: bytes) -> None:
        """Append what has arrived; small pieces are put together, since each object takes memory of its own."""
        self.num_bytes += len(part)
        if len(part) >= _PART_BYTES and not self._rest:
            self._parts.append(part)
            return
        self._rest += part
        if len(self._rest) >= _PART_BYTES:
            self._join_rest()

    def all_parts(self) -> tuple[bytes, ...]:
        """Return what has arrived."""
        self._join_rest()
        return tuple(self._parts)

    def _join_rest(self) -> None:
        if self._rest:
            self._parts.append(bytes(self._rest))
            self._rest.clear()

    def may_exceed(self) -> bool:
        """Return True if what has arrived should now be counted exactly."""
        # A value has at least one character.
        if self.num_bytes <= min(self._limits.max_body_values, self._limits.max_body_objects):
            return False
        for part in self._parts[self._num_counted :]:
            self._bound = self._bound.plus(JsonSize.at_most(part))
        self._num_counted = len(self._parts)
        if self._bound.fits(self._limits, self._times):
            return False
        self._times *= 2
        return True


def _converted(
    make: Callable[[dict[str, object]], ResultT], limits: RequestLimits, parts: Sequence[bytes], level: Level
) -> Converted[ResultT]:
    return convert_fields(make, limits, read_fields(parts, limits), level)


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
