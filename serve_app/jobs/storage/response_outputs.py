"""Outputs of responses in the background: their leases, and their deltas, which are committed before they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from serve_app.jobs.api.responses import ResponseEnd, ResponseProgress, ResponseRun, ResponseStatus, StoredDelta
from serve_app.jobs.storage.ownership import is_alive
from serve_app.jobs.storage.rows.responses import end_response, get_row, response_record
from serve_app.jobs.storage.schema.tables import QUEUED, response_deltas, responses

MAX_DELTAS = 512
"""Most deltas that are read at a time."""
_INSERT = insert(response_deltas)
_HELD = select(responses.c.number).where(responses.c.owner == bindparam("held_by"))
_TO_RUN = select(responses.c.number).where(responses.c.model == bindparam("of_model")).where(QUEUED)
_TO_RUN = _TO_RUN.order_by(responses.c.number).limit(bindparam("most"))
_DELTAS = (
    select(response_deltas)
    .where(response_deltas.c.response == bindparam("number"), response_deltas.c.position > bindparam("after"))
    .order_by(response_deltas.c.position)
    .limit(bindparam("most"))
)


@dataclass(frozen=True, slots=True)
class LeasedResponse:
    """Response in the background that its owner may run, with the output that is committed already."""

    number: int
    id: str
    tenant: str
    response: str
    """JSON of the response as it began."""
    run: ResponseRun
    deltas: tuple[StoredDelta, ...]


@dataclass(frozen=True, slots=True)
class NewOutput:
    """Delta of a response to be committed, and the response's end with its last one."""

    number: int
    delta: StoredDelta | None
    end: ResponseEnd | None = None


def has_waiting(connection: Connection, model: str) -> bool:
    """Return True if a response of a model waits to be run."""
    return connection.execute(_TO_RUN, {"of_model": model, "most": 1}).first() is not None


def lease_responses(connection: Connection, owner: str, model: str, most: int) -> list[LeasedResponse]:
    """Lease up to `most` responses that wait, the oldest first; none if the owner is dead."""
    if not is_alive(connection, owner):
        return []
    waiting = _TO_RUN.with_for_update(skip_locked=True)
    numbers = list(connection.execute(waiting, {"of_model": model, "most": most}).scalars())
    taken = update(responses).where(responses.c.number.in_(numbers))
    values = {"status": ResponseStatus.IN_PROGRESS.value, "owner": owner}
    rows = connection.execute(taken.values(values).returning(responses)).all() if numbers else []
    return [_leased(connection, row) for row in sorted(rows, key=lambda row: row.number)]


def _leased(connection: Connection, row: Row[Any]) -> LeasedResponse:
    run = ResponseRun(row.run, row.prompt)
    return LeasedResponse(row.number, row.id, row.tenant, row.response, run, tuple(_read(connection, row.number)))


def _read(connection: Connection, number: int, after: int = -1, most: int = 2**31 - 1) -> list[StoredDelta]:
    rows = connection.execute(_DELTAS, {"number": number, "after": after, "most": most})
    return [StoredDelta(row.position, row.token_ids, row.text, row.finish) for row in rows]


def commit_outputs(connection: Connection, owner: str, outputs: Sequence[NewOutput]) -> set[int]:
    """Store new deltas and ends of the responses that the owner holds; return the numbers of all that it still holds.

    Those of others are dropped: they were cancelled or deleted, or run elsewhere.
    """
    if not is_alive(connection, owner):
        return set()
    held = held_numbers(connection, owner)
    own = [output for output in outputs if output.number in held]
    rows = [
        {
            "response": output.number, "position": output.delta.position, "token_ids": output.delta.token_ids,
            "text": output.delta.text, "finish": output.delta.finish,
        }
        for output in own if output.delta is not None
    ]  # fmt: skip
    if rows:
        connection.execute(_INSERT, rows)
    for output in own:
        if output.end is not None:
            _end(connection, output.number, output.end)
            held.discard(output.number)
    return held


def held_numbers(connection: Connection, owner: str) -> set[int]:
    """Return the numbers of the responses that an owner holds."""
    return set(connection.execute(_HELD, {"held_by": owner}).scalars())


def _end(connection: Connection, number: int, end: ResponseEnd) -> None:
    row = connection.execute(select(responses).where(responses.c.number == number).with_for_update()).one()
    size = func.length(response_deltas.c.token_ids) + func.length(response_deltas.c.text)
    sizes = select(func.coalesce(func.sum(size), 0)).where(response_deltas.c.response == number)
    end_response(connection, row, end, int(connection.execute(sizes).scalar_one()))


def read_progress(connection: Connection, tenant: str, response_id: str, after: int) -> ResponseProgress:
    """Return a tenant's response with its deltas behind number `after`.

    Raises:
        UnknownResponse: there is no such response, or it belongs to another tenant.
    """
    row = get_row(connection, tenant, response_id)
    deltas = _read(connection, row.number, after, MAX_DELTAS + 1)
    return ResponseProgress(response_record(row), tuple(deltas[:MAX_DELTAS]), len(deltas) > MAX_DELTAS)
