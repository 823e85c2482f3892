"""Submission of a batch in one transaction, with its checks."""

from __future__ import annotations

from pydantic_core import to_json
from sqlalchemy import Connection, insert, select

from replicas.errors import InvalidRequest, Overloaded
from serve_app.jobs.api.errors import IdempotencyKeyInUse
from serve_app.jobs.api.records import BatchKind, BatchStatus, JobsSettings, NewBatch, Submission
from serve_app.jobs.storage.batch_states import new_batch_values
from serve_app.jobs.storage.lines import LineRow, add_lines, refresh_statistics
from serve_app.jobs.storage.rows.batches import (
    BatchRow,
    batch_record,
    find_batch,
    num_unfinished_batches,
    num_unfinished_lines,
    select_batch,
)
from serve_app.jobs.storage.rows.files import get_file
from serve_app.jobs.storage.schema.tables import batches, idempotency_keys

_RETRY_AFTER_S = 30.0
# Built once: building a statement takes as long as executing it.
_INSERT = insert(batches).returning(batches)


def submit_batch(
    connection: Connection, new: NewBatch, batch_id: str, rows: list[LineRow], settings: JobsSettings, now: float
) -> Submission:
    """Accept a batch under a new id. `rows` are its lines; a batch with an input file has none yet.

    If its idempotency key was used before, return the earlier batch.

    Raises:
        IntegrityError: its id or its key is taken; `accepted_before` returns the batch that has it.
        IdempotencyKeyInUse: its key was used before with another body.
        UnknownFile: there is no such input file.
        InvalidRequest: the file is not for batches, or there are too many lines or none.
        Overloaded: the tenant would have more unfinished batches or lines than it may.
    """
    known = _known_by_key(connection, new)
    if known is not None:
        return Submission(batch_record(known), is_new=known.id == batch_id)
    _check_input(connection, new, settings, now)
    _check_quota(connection, new, settings)
    accepted = connection.execute(_INSERT, _values(new, batch_id, rows, settings.model_name, now)).one()
    add_lines(connection, rows)
    refresh_statistics(connection, len(rows))
    if new.idempotency_key is not None:
        key = {"tenant": new.tenant, "key": new.idempotency_key, "digest": new.body_digest, "batch_id": batch_id}
        connection.execute(insert(idempotency_keys), key)
    return Submission(batch_record(accepted), is_new=True)


def accepted_before(connection: Connection, new: NewBatch, batch_id: str) -> Submission | None:
    """Return the result of an earlier submission with the same id or idempotency key; None: there was none.

    The id repeats when an answer was lost. The key may also come twice at the same time.

    Raises:
        IdempotencyKeyInUse: its key was used before with another body.
    """
    known = find_batch(connection, batch_id) or _known_by_key(connection, new)
    return None if known is None else Submission(batch_record(known), is_new=known.id == batch_id)


def _known_by_key(connection: Connection, new: NewBatch) -> BatchRow | None:
    if new.idempotency_key is None:
        return None
    query = select(idempotency_keys).where(
        idempotency_keys.c.tenant == new.tenant, idempotency_keys.c.key == new.idempotency_key
    )
    known = connection.execute(query).first()
    if known is None:
        return None
    if known.digest != new.body_digest:
        raise IdempotencyKeyInUse(f"the idempotency key `{new.idempotency_key}` came before with another body")
    return select_batch(connection, known.batch_id)


def _check_input(connection: Connection, new: NewBatch, settings: JobsSettings, now: float) -> None:
    if new.input_file_id is None:
        if not 0 < len(new.lines) <= settings.max_batch_lines:
            raise InvalidRequest(
                f"the batch has {len(new.lines)} requests; 1 to {settings.max_batch_lines} are accepted", "prompts"
            )
        return
    file = get_file(connection, new.tenant, new.input_file_id, now)
    if file.purpose != "batch":
        raise InvalidRequest(f"file `{file.id}` has the purpose `{file.purpose}`; it must be `batch`", "input_file_id")


def _check_quota(connection: Connection, new: NewBatch, settings: JobsSettings) -> None:
    num_batches = num_unfinished_batches(connection, new.tenant)
    if num_batches >= settings.max_unfinished_batches:
        raise Overloaded(
            f"{num_batches} batches and jobs have not ended; the limit is {settings.max_unfinished_batches}",
            _RETRY_AFTER_S,
            "max_batches_per_tenant",
            "rate_limit_exceeded",
        )
    if new.kind is BatchKind.JOB:
        return  # a job has one line: the limit of batches bounds jobs, and counting lines is slower than an index
    num_lines = num_unfinished_lines(connection, new.tenant)
    if num_lines + len(new.lines) > settings.max_unfinished_lines:
        raise Overloaded(
            f"{num_lines} requests of batches are still to be done; the limit is {settings.max_unfinished_lines}",
            _RETRY_AFTER_S,
            "max_lines_per_tenant",
            "rate_limit_exceeded",
        )


def _values(new: NewBatch, batch_id: str, rows: list[LineRow], model: str, now: float) -> dict[str, object]:
    status = BatchStatus.IN_PROGRESS if new.input_file_id is None else BatchStatus.VALIDATING
    return {
        "id": batch_id,
        "model": model,
        "kind": new.kind.value,
        "tenant": new.tenant,
        "endpoint": new.endpoint,
        "band": int(new.band),
        "band_ceiling": int(new.band_ceiling),
        "status": status.value,
        "input_file_id": new.input_file_id,
        "metadata": None if new.metadata is None else to_json(dict(new.metadata)).decode(),
        "callback_url": new.callback_url,
        "request_id": new.request_id,
        "traceparent": None if new.trace is None else new.trace.traceparent,
        "tracestate": None if new.trace is None else new.trace.tracestate,
        "output_expires_after_s": new.output_expires_after_s,
        "expires_unix_s": None if new.window_s is None else now + new.window_s,
        "num_lines": len(rows),
        "num_queued": len(rows),
        "num_completed": 0,
        "num_failed": 0,
        "waiting_tokens": sum(row["expected_tokens"] for row in rows),
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "num_cached_tokens": 0,
        **new_batch_values(status, now),
    }
