"""Input files in JSONL: splitting into lines, with memory bounded by one part and one line, and checks of the lines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from replicas.errors import InvalidRequest, UnknownModel
from serve_app.errors import shortened
from serve_app.jobs.api.new_lines import NewLine
from serve_app.jobs.api.records import BatchError
from serve_app.openai.request.parsing import BYTE_ORDER_MARK, parse_json
from serve_app.openai.request.validation import check_model

_MAX_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class RawLine:
    """Line that is not blank, without the white space around it."""

    number: int
    """Number of the line, from 1; blank lines count."""
    data: bytes


class InvalidFile(Exception):
    """Error for a file that is not read further; `error` is the reason."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error)
        self.error = error


async def split_lines(parts: AsyncIterator[bytes], max_line_bytes: int) -> AsyncGenerator[list[RawLine], None]:
    """Yield the lines that end in each part, in order; a list may be empty.

    Raises:
        InvalidFile: a line has more than `max_line_bytes`; the file is not read further.
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
            raise _too_long(number + 1, max_line_bytes)
        yield lines
    last = _line(rest, number + 1, max_line_bytes)
    yield [] if last is None else [last]


def _line(data: bytes, number: int, max_line_bytes: int) -> RawLine | None:
    data = data.strip().removeprefix(BYTE_ORDER_MARK).lstrip()  # Files that were joined have several marks.
    if len(data) > max_line_bytes:
        raise _too_long(number, max_line_bytes)
    return RawLine(number, data) if data else None


def _too_long(number: int, max_line_bytes: int) -> InvalidFile:
    message = f"This line has more than {max_line_bytes} bytes, the most that is accepted."
    return InvalidFile(BatchError("line_too_long", message, line=number))


class LineChecker:
    """Checker of one batch's lines: the fields around the body, and the model that the body names.

    The rest of a body is validated when the line runs, as its endpoint does. An error there fails only that line.
    """

    def __init__(self, endpoint: str, model_names: Sequence[str]) -> None:
        self._url = endpoint
        self._model_names = model_names

    def check(self, data: bytes, number: int) -> NewLine | BatchError:
        """Return the request in a line, or the first error found in it; `number` is the line's, from 1."""
        try:
            fields = parse_json(data)
        except InvalidRequest:
            return BatchError("invalid_json_line", "This line is not parseable as a JSON object.", line=number)
        try:
            return self._line(fields)
        except (InvalidRequest, UnknownModel) as error:
            param = error.param if isinstance(error, InvalidRequest) else "body.model"
            return BatchError(error.code, error.message, param, number)

    def _line(self, fields: Mapping[str, object]) -> NewLine:
        for name in _FIELDS:
            if fields.get(name) is None:
                raise InvalidRequest(f"`{name}` is missing", name, "missing_required_parameter")
        if unknown := next((name for name in fields if name not in _FIELDS), None):
            raise InvalidRequest(f"`{shortened(unknown)}` is not a field of a line", shortened(unknown))
        custom_id, body = fields["custom_id"], fields["body"]
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS or "\0" in custom_id:
            raise InvalidRequest(
                f"`custom_id` must be a string of 1 to {_MAX_ID_CHARS} characters, none of them NUL", "custom_id"
            )
        if fields["method"] != "POST":
            raise InvalidRequest(f"`method` is {shortened(repr(fields['method']))}; it must be POST", "method")
        if fields["url"] != self._url:
            raise InvalidRequest(
                f"`url` is {shortened(repr(fields['url']))}; the batch's endpoint is {self._url}",
                "url",
                "mismatched_url",
            )
        if not isinstance(body, dict):
            raise InvalidRequest("`body` must be an object", "body")
        if isinstance(body.get("model"), str):
            check_model(body["model"], self._model_names)
        return NewLine(custom_id, body)
