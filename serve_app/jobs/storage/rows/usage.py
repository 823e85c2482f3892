"""Rows of `usage`: reports of processes are added up, each report once."""

from __future__ import annotations

from dataclasses import asdict, astuple, fields

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from replicas.protocol import Band
from serve_app.jobs.api.usage import UsageKey, UsagePage, UsageQuery, UsageReport, UsageRow, UsageSums
from serve_app.jobs.storage.schema.tables import usage, usage_reporters

_KEEP_REPORTERS_S = 7 * 86_400.0
"""Seconds after its last report at which a process is forgotten; it has ended long before."""
_SUMS = tuple(field.name for field in fields(UsageSums))
# Built once: building a statement takes as long as executing it.
_NUMBER = select(usage_reporters.c.number).where(usage_reporters.c.id == bindparam("reporter_id")).with_for_update()
"""Locks the row: a report that is repeated may come to two workers at the same time."""
_NOTE = (
    update(usage_reporters)
    .where(usage_reporters.c.id == bindparam("reporter_id"))
    .values(number=bindparam("to_number"), reported_unix_s=bindparam("now"))
)
_FORGET = delete(usage_reporters).where(usage_reporters.c.reported_unix_s < bindparam("before"))
_ADD = (
    update(usage)
    .where(
        usage.c.day == bindparam("of_day"),
        usage.c.tenant == bindparam("of_tenant"),
        usage.c.model == bindparam("of_model"),
        usage.c.band == bindparam("of_band"),
    )
    .values({name: usage.c[name] + bindparam(f"more_{name}") for name in _SUMS})
)
_INSERT = insert(usage)


def add_report(connection: Connection, report: UsageReport, now: float) -> None:
    """Add a report's usage, unless it was added before.

    Raises:
        IntegrityError: another process has added a row of the same key at the same time; a repetition succeeds.
    """
    known = connection.execute(_NUMBER, {"reporter_id": report.reporter_id}).scalar()
    if known is None:
        connection.execute(_FORGET, {"before": now - _KEEP_REPORTERS_S})
        first = {"id": report.reporter_id, "number": report.number, "reported_unix_s": now}
        connection.execute(insert(usage_reporters), first)
    elif report.number <= known:
        return
    else:
        connection.execute(_NOTE, {"reporter_id": report.reporter_id, "to_number": report.number, "now": now})
    # In one order, so that reports at the same time do not deadlock.
    for row in sorted(report.rows, key=lambda row: astuple(row.key)):
        _add(connection, row)


def find_usage(connection: Connection, query: UsageQuery) -> UsagePage:
    """Return the usage that a query asks for."""
    order = (usage.c.day, usage.c.tenant, usage.c.model, usage.c.band)
    selection = select(usage).where(usage.c.day.between(query.first_day.isoformat(), query.last_day.isoformat()))
    if query.tenant is not None:
        selection = selection.where(usage.c.tenant == query.tenant)
    if query.model is not None:
        selection = selection.where(usage.c.model == query.model)
    rows = connection.execute(selection.order_by(*order).limit(query.limit + 1)).all()
    return UsagePage(
        tuple(
            UsageRow(
                UsageKey(row.day, row.tenant, row.model, Band(row.band)),
                UsageSums(**{name: getattr(row, name) for name in _SUMS}),
            )
            for row in rows[: query.limit]
        ),
        has_more=len(rows) > query.limit,
    )


def _add(connection: Connection, row: UsageRow) -> None:
    key, sums = row.key, asdict(row.sums)
    result = connection.execute(
        _ADD,
        {"of_day": key.day, "of_tenant": key.tenant, "of_model": key.model, "of_band": int(key.band)}
        | {f"more_{name}": value for name, value in sums.items()},
    )
    if result.rowcount == 0:
        connection.execute(
            _INSERT, {"day": key.day, "tenant": key.tenant, "model": key.model, "band": int(key.band), **sums}
        )
