"""Trace files: requests with their times, one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from replicas.protocol import Band


class TracedRequest(BaseModel):
    """One line of a trace file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: Annotated[float, Field(ge=0)]
    """Seconds after the start."""
    prompt: str | list[int] | None = None
    """Text, or token ids where the endpoint takes them."""
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    band: str | None = None
    extra_body: dict[str, object] = {}
    """Further fields of the body."""

    @model_validator(mode="after")
    def _is_whole(self) -> TracedRequest:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("it needs either `prompt` or `prompt_tokens`")
        if self.band is not None:
            band_of(self.band)
        return self


def band_of(name: str) -> Band:
    """Return the band of a name, such as `interactive`.

    Raises:
        ValueError: there is no such band.
    """
    try:
        return Band[name.upper()]
    except KeyError:
        names = ", ".join(band.name.lower() for band in Band)
        raise ValueError(f"band is '{name}'; it must be one of {names}") from None


_TracedT = TypeVar("_TracedT", bound=TracedRequest)


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a file of JSON lines; return the requests by time.

    Raises:
        ValueError: a line is not a request; the message names its number.
    """
    return read_requests(path, TracedRequest)


def read_requests(path: Path, kind: type[_TracedT]) -> list[_TracedT]:
    """Read a file of JSON lines as `read_trace` does, into requests of a kind that has more fields."""
    with path.open(encoding="utf-8-sig") as file:
        requests = [_request(line, kind, f"{path}, line {number}") for number, line in enumerate(file, 1)]
    if not requests:
        raise ValueError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.time)


def _request(line: str, kind: type[_TracedT], place: str) -> _TracedT:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        fields = "".join(f"{part}: " for part in first["loc"])
        raise ValueError(f"{place}: {fields}{first['msg'].removeprefix('Value error, ')}") from None
