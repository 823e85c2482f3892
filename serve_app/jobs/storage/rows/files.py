"""Rows of `files`, and of `files_to_delete`: deleted files whose bytes are still in the store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select

from serve_app.jobs.api.errors import FileInUse, UnknownFile
from serve_app.jobs.api.records import BatchStatus, FileRecord, Page, PageRequest
from serve_app.jobs.storage.rows.batches import UNFINISHED
from serve_app.jobs.storage.schema.tables import batches, files, files_to_delete, read_page

READING = (BatchStatus.VALIDATING.value,)
"""Statuses in which a batch reads its input file. Validation copies its lines; later the file is not needed."""


def add_file(connection: Connection, file: FileRecord) -> None:
    """Record a file; an existing record is left as it is."""
    if connection.execute(select(files.c.id).where(files.c.id == file.id)).first() is None:
        connection.execute(insert(files).values(asdict(file)))


def get_file(connection: Connection, tenant: str, file_id: str, now: float) -> FileRecord:
    """Return a file that has not expired.

    Raises:
        UnknownFile: there is no such file, or it belongs to another tenant.
    """
    row = connection.execute(select(files).where(_visible(tenant, now), files.c.id == file_id)).first()
    if row is None:
        raise UnknownFile(f"there is no file `{file_id[:100]}`")
    return _record(row)


def list_files(
    connection: Connection, tenant: str, purpose: str | None, page: PageRequest, now: float
) -> Page[FileRecord]:
    """Return a page of a tenant's files that have not expired, only those of `purpose` unless it is None."""
    condition = _visible(tenant, now)
    if purpose is not None:
        condition &= files.c.purpose == purpose
    return read_page(connection, files, condition, page, _record)


def forget_file(connection: Connection, tenant: str, file_id: str, now: float) -> None:
    """Delete a file's record and schedule the deletion of its bytes.

    Raises:
        UnknownFile: there is no such file, or it belongs to another tenant.
        FileInUse: it is the input of a batch that is not final.
    """
    get_file(connection, tenant, file_id, now)
    reader = select(batches.c.id).where(batches.c.input_file_id == file_id, batches.c.status.in_(UNFINISHED))
    if (row := connection.execute(reader).first()) is not None:
        raise FileInUse(f"batch `{row.id}` reads file `{file_id}` and has not ended")
    _schedule_deletion(connection, [file_id])


def expire_files(connection: Connection, now: float, limit: int) -> int:
    """Delete up to `limit` expired records, schedule the deletion of their bytes, and return their number.

    A file that a batch is reading is kept until the batch is validated.
    """
    is_read = select(batches.c.id).where(batches.c.input_file_id == files.c.id, batches.c.status.in_(READING)).exists()
    expired = select(files.c.id).where(files.c.expires_unix_s <= now, ~is_read).limit(limit)
    return _schedule_deletion(connection, list(connection.execute(expired).scalars()))


def pending_deletion(connection: Connection, limit: int, excluding: Collection[str] = ()) -> list[str]:
    """Return the ids of some files, none of `excluding`, whose bytes are still to be deleted."""
    query = select(files_to_delete.c.id).where(files_to_delete.c.id.not_in(excluding)).limit(limit)
    return list(connection.execute(query).scalars())


def bytes_deleted(connection: Connection, file_id: str) -> None:
    """Record that the bytes of a deleted file are gone from the store."""
    connection.execute(delete(files_to_delete).where(files_to_delete.c.id == file_id))


def _schedule_deletion(connection: Connection, file_ids: list[str]) -> int:
    if file_ids:
        # Another worker may delete the same file at the same time; the one that deletes the row schedules the rest.
        gone = connection.execute(delete(files).where(files.c.id.in_(file_ids)).returning(files.c.id)).scalars().all()
        if gone:
            connection.execute(insert(files_to_delete), [{"id": file_id} for file_id in gone])
    return len(file_ids)


def _visible(tenant: str, now: float) -> ColumnElement[bool]:
    return (files.c.tenant == tenant) & or_(files.c.expires_unix_s.is_(None), files.c.expires_unix_s > now)


def _record(row: Row[Any]) -> FileRecord:
    return FileRecord(**row._mapping)
