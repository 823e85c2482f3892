"""Queries for waiting work: the batches with lines to lease, and the sum of their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, Select, bindparam, cast, func, select

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind, BatchStatus
from serve_app.jobs.storage.schema.tables import batches, lines
from serve_app.tracing.context import TraceContext

_DEADLINE_STEP_S = 64.0
"""Width of a deadline bucket. The backlog reports each bucket with its earliest deadline."""


@dataclass(slots=True)
class OpenBatch:
    """Batch in progress with queued lines."""

    id: str
    tenant: str
    endpoint: str
    band: Band
    band_ceiling: Band
    """Most urgent band that the batch may be raised to."""
    expires_unix_s: float | None
    num_queued: int
    line_tokens: float = 1.0
    """Mean of the expected prompt and output tokens of its lines that have not ended."""
    kind: BatchKind = BatchKind.FILE
    trace: TraceContext | None = None
    """Span that asked for the batch."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work of queued or leased lines, of batches with one band and about the same deadline."""

    band: Band
    expires_unix_s: float | None
    """Earliest deadline of these batches; None: they have none."""
    num_lines: int
    tokens: int
    """Expected prompt and output tokens of the lines."""


def open_batches(connection: Connection, model: str, limit_per_tenant: int) -> list[OpenBatch]:
    """Return batches with queued lines: most urgent band first, then nearest deadline, then oldest.

    At most `limit_per_tenant` batches of each tenant and band are returned.
    """
    return [
        OpenBatch(
            row.id,
            row.tenant,
            row.endpoint,
            Band(row.band),
            Band(row.band_ceiling),
            row.expires_unix_s,
            row.num_queued,
            float(row.line_tokens),
            BatchKind(row.kind),
            TraceContext.of_columns(row.traceparent, row.tracestate),
        )
        for row in connection.execute(_SOONEST, {"model": model, "max_place": limit_per_tenant})
    ]


def backlog(connection: Connection, model: str) -> list[Backlog]:
    """Return all queued work, summed by band and deadline bucket."""
    return [
        Backlog(Band(band), expires, int(num_lines), int(num_tokens))
        for band, expires, num_lines, num_tokens in connection.execute(_BACKLOG, {"model": model})
    ]


def running_elsewhere(connection: Connection, model: str, owner: str) -> Counter[tuple[str, Band]]:
    """Return the expected tokens of the lines that other workers hold, by tenant and band."""
    rows = connection.execute(_RUNNING_ELSEWHERE, {"model": model, "owner": owner})
    return Counter({(tenant, Band(band)): int(num_tokens) for tenant, band, num_tokens in rows})


def still_in_progress(connection: Connection, batch_ids: Collection[str]) -> set[str]:
    """Return those of these batches that are in progress; only their lines may run."""
    return set(connection.execute(_IN_PROGRESS, {"batch_ids": list(batch_ids)}).scalars())


def _soonest_batches() -> Select[Any]:
    soonest = (batches.c.band, batches.c.expires_unix_s.is_(None), batches.c.expires_unix_s, batches.c.created_unix_s)
    place = func.row_number().over(partition_by=(batches.c.tenant, batches.c.band), order_by=soonest[1:])
    columns = (
        "id", "tenant", "endpoint", "band", "band_ceiling", "expires_unix_s", "num_queued", "created_unix_s", "kind",
        "traceparent", "tracestate",
    )  # fmt: skip
    line_tokens = (1.0 * batches.c.waiting_tokens / _UNDONE).label("line_tokens")
    selected = (*(batches.c[name] for name in columns), line_tokens, place.label("place"))
    ranked = select(*selected).where(_WAITS).subquery()
    order = (ranked.c.band, ranked.c.expires_unix_s.is_(None), ranked.c.expires_unix_s, ranked.c.created_unix_s)
    return select(ranked).where(ranked.c.place <= bindparam("max_place")).order_by(*order)


def _backlog() -> Select[Any]:
    tokens = batches.c.waiting_tokens * batches.c.num_queued / _UNDONE
    step = cast(batches.c.expires_unix_s / _DEADLINE_STEP_S, BigInteger)
    sums = (func.min(batches.c.expires_unix_s), func.sum(batches.c.num_queued), func.sum(tokens))
    return select(batches.c.band, *sums).where(_WAITS).group_by(batches.c.band, step)


# Built once: building a statement takes as long as executing it.
_UNDONE = batches.c.num_lines - batches.c.num_completed - batches.c.num_failed
_IS_IN_PROGRESS = batches.c.status == BatchStatus.IN_PROGRESS.value
_WAITS = _IS_IN_PROGRESS & (batches.c.num_queued > 0) & (batches.c.model == bindparam("model"))
_SOONEST = _soonest_batches()
_BACKLOG = _backlog()
_RUNNING_ELSEWHERE = (
    select(batches.c.tenant, batches.c.band, func.sum(lines.c.expected_tokens))
    .join_from(lines, batches, lines.c.batch_id == batches.c.id)
    .where(lines.c.owner.isnot(None), lines.c.owner != bindparam("owner"), batches.c.model == bindparam("model"))
    .group_by(batches.c.tenant, batches.c.band)
)
_IN_PROGRESS = select(batches.c.id).where(batches.c.id.in_(bindparam("batch_ids", expanding=True)), _IS_IN_PROGRESS)
