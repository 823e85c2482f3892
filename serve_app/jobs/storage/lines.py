"""Rows of `lines`: creation, reading of results, deletion. `leases.py` has the transactions of running lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection, Row, delete, insert, select

from serve_app.jobs.api.records import LineStatus, NewLine
from serve_app.jobs.jsonl.cost import size_of
from serve_app.jobs.storage.tables import lines

LineRow = dict[str, Any]

_INSERT = insert(lines)


def new_row(batch_id: str, position: int, line: NewLine) -> LineRow:
    """Return the row of a new queued line."""
    size = size_of(line.body)
    return {
        "batch_id": batch_id,
        "position": position,
        "custom_id": line.custom_id,
        "body": to_json(line.body).decode(),
        "expected_tokens": size.expected_tokens,
        "length_rank": size.length_rank,
        "prefix_key": size.prefix_key,
        "status": LineStatus.QUEUED.value,
        "attempt": 0,
    }


def add_lines(connection: Connection, rows: Sequence[LineRow]) -> None:
    """Insert lines whose custom ids are new in their batch."""
    if rows:
        connection.execute(_INSERT, rows)


def taken_custom_ids(connection: Connection, batch_id: str, custom_ids: Iterable[str]) -> set[str]:
    """Return those of these custom ids that the batch already has."""
    query = select(lines.c.custom_id).where(lines.c.batch_id == batch_id, lines.c.custom_id.in_(list(custom_ids)))
    return set(connection.execute(query).scalars())


def delete_lines(connection: Connection, batch_id: str, limit: int) -> int:
    """Delete up to `limit` of a batch's lines, and return their number."""
    some = select(lines.c.position).where(lines.c.batch_id == batch_id).limit(limit)
    return connection.execute(delete(lines).where(lines.c.batch_id == batch_id, lines.c.position.in_(some))).rowcount


def ended_lines(connection: Connection, batch_id: str, after: int, limit: int, is_success: bool) -> list[Row[Any]]:
    """Return lines with a position above `after`, in order: those that succeeded, or all others.

    All lines of the batch must have ended.
    """
    has_succeeded = lines.c.status == LineStatus.SUCCEEDED.value
    query = select(lines).where(
        lines.c.batch_id == batch_id, lines.c.position > after, has_succeeded if is_success else ~has_succeeded
    )
    return list(connection.execute(query.order_by(lines.c.position).limit(limit)))
