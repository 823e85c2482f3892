"""Pages of a list in order of creation (keyset pagination)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, select, tuple_

from serve_app.jobs.api.records import Page, PageRequest

ItemT = TypeVar("ItemT")


def read_page(
    connection: Connection,
    table: Table,
    condition: ColumnElement[bool],
    page: PageRequest,
    record: Callable[[Row[Any]], ItemT],
) -> Page[ItemT]:
    """Return the rows of `table` that meet `condition` and come after `page.after`; none if that id is unknown."""
    rows = connection.execute(_page_of(table, condition, page)).all()
    return Page(tuple(record(row) for row in rows[: page.limit]), has_more=len(rows) > page.limit)


def _page_of(table: Table, condition: ColumnElement[bool], page: PageRequest) -> Select[Any]:
    """Select one row more than the page holds; the extra row shows that there are more."""
    key = tuple_(table.c.created_unix_s, table.c.id)
    query = select(table).where(condition)
    if page.after is not None:
        last = select(table.c.created_unix_s, table.c.id).where(condition, table.c.id == page.after).scalar_subquery()
        query = query.where(key > last if page.is_ascending else key < last)
    columns = (table.c.created_unix_s, table.c.id)
    return query.order_by(*(c.asc() if page.is_ascending else c.desc() for c in columns)).limit(page.limit + 1)
