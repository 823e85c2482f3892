"""Operations of the HTTP API: declarations of the handlers, with their routes, requests, answers and failures."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve_app.openai.request.body import IgnoredValues

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Response]])

TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
"""Request headers of the callers' traces."""
URGENCY_HEADERS = TRACE_HEADERS | {
    "request-timeout-ms",
    "x-stainless-read-timeout",
    "x-stainless-timeout",
    "x-headway-priority",
}
"""Request headers of generated text: the trace, the deadline and the band."""
BODY_FAILURES = frozenset({400, 408, 413, 415})
"""Statuses of the failures of a route that reads a body."""
COMPLETION_FAILURES = BODY_FAILURES | {404, 429, 499, 502, 503, 504}
SUBMISSION_FAILURES = BODY_FAILURES | {404, 409, 429, 503}
LOOKUP_FAILURES = frozenset({404, 503})


class Access(Enum):
    """Callers that a route serves, if there are API keys."""

    OPEN = "all"
    KEY = "callers with a key"
    LIMITED = "callers with a key, within its limits"
    OPERATOR = "operators"


@dataclass(frozen=True, slots=True)
class Fields:
    """JSON body: the fields of one schema, with changes that its endpoint makes."""

    schema: type[BaseModel]
    ignored: IgnoredValues
    title: str | None = None
    """Name of the changed schema; None: nothing is changed."""
    added: type[BaseModel] | None = None
    """Schema of further fields."""
    dropped: tuple[str, ...] = ()
    """Fields of `schema` that the endpoint does not take."""
    optional: tuple[str, ...] = ()
    """Required fields of `schema` that may be left out here."""
    limited: Mapping[str, Mapping[str, Any]] | None = None
    """Further limits of single fields, as JSON Schema."""


@dataclass(frozen=True, slots=True)
class Created:
    """Object that an operation creates."""

    path: str
    """Path of the object; its only parameter is the object's id."""
    id_field: str = "id"
    """Field of the answer with the id."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Route with its description; it decorates the handler, the first line of whose docstring is the summary."""

    method: str
    path: str
    group: str
    answer: Any = None
    """Type of the JSON answer; None: no answer is JSON."""
    other_answers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Types of the events or lines of each other answer, by media type; none for a whole text or file."""
    access: Access = Access.KEY
    status: int = 200
    failures: frozenset[int] = frozenset()
    """Statuses of failures beyond those that every route has."""
    bodies: tuple[Fields, ...] = ()
    """JSON bodies, one of which is sent."""
    form: type[BaseModel] | None = None
    """Fields of a form with one file; None: the body, if there is one, is JSON."""
    query: type[BaseModel] | None = None
    headers: frozenset[str] = frozenset()
    """Request headers with a meaning for this route."""
    answer_headers: tuple[str, ...] = ()
    """Beginnings of the names of the answers' headers beyond those of every route."""
    error: Any = None
    """Type of the body of a failure; None: OpenAI's error object."""
    created: Created | None = None
    """Object that the operation creates; None: it creates none."""
    summary: str = ""

    def __call__(self, handler: HandlerT) -> HandlerT:
        """Declare the operation of a handler."""
        operation = replace(self, summary=(handler.__doc__ or "").partition("\n")[0])
        handler.operation = operation  # type: ignore[attr-defined]  # functions have attributes
        return handler

    @property
    def plain_path(self) -> str:
        """Path without the converters of its parameters, such as `:path`."""
        return re.sub(r":[a-z]+}", "}", self.path)


def routes_of(endpoints: object) -> Mapping[Operation, Callable[[Request], Awaitable[Response]]]:
    """Return the handlers of an object by their operations, in the order of their definition."""
    members = vars(type(endpoints)).items()
    return {member.operation: getattr(endpoints, name) for name, member in members if hasattr(member, "operation")}
