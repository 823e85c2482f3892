"""Rows of `files`, and of `files_to_delete`: bytes that outlived their record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select

from serve_app.jobs.api.errors import FileInUse, UnknownFile
from serve_app.jobs.api.records import BatchStatus, FileRecord, Page, PageRequest
from serve_app.jobs.storage.batches import UNFINISHED
from serve_app.jobs.storage.paging import read_page
from serve_app.jobs.storage.tables import batches, files, files_to_delete

READING = (BatchStatus.VALIDATING.value,)
"""A batch's lines are copied while it is validated; afterwards it needs the file no more."""


def add_file(connection: Connection, file: FileRecord) -> None:
    """Note a file; one that is noted already stays as it is."""
    if connection.execute(select(files.c.id).where(files.c.id == file.id)).first() is None:
        connection.execute(insert(files).values(asdict(file)))


def get_file(connection: Connection, tenant: str, file_id: str, now: float) -> FileRecord:
    """A file that has not expired.

    Raises:
        UnknownFile: there is none, or it is another tenant's.
    """
    row = connection.execute(select(files).where(_visible(tenant, now), files.c.id == file_id)).first()
    if row is None:
        raise UnknownFile(f"there is no file `{file_id[:100]}`")
    return _record(row)


def list_files(
    connection: Connection, tenant: str, purpose: str | None, page: PageRequest, now: float
) -> Page[FileRecord]:
    """Some of a tenant's files that have not expired."""
    condition = _visible(tenant, now)
    if purpose is not None:
        condition &= files.c.purpose == purpose
    return read_page(connection, files, condition, page, _record)


def forget_file(connection: Connection, tenant: str, file_id: str, now: float) -> None:
    """Delete a file's record and doom its bytes.

    Raises:
        UnknownFile: there is none, or it is another tenant's.
        FileInUse: a batch that is not final reads it.
    """
    get_file(connection, tenant, file_id, now)
    reader = select(batches.c.id).where(batches.c.input_file_id == file_id, batches.c.status.in_(UNFINISHED))
    if (row := connection.execute(reader).first()) is not None:
        raise FileInUse(f"batch `{row.id}` reads file `{file_id}` and has not ended")
    _schedule_deletion(connection, [file_id])


def expire_files(connection: Connection, now: float, limit: int) -> int:
    """Delete the records of files that have expired and doom their bytes; a file that is read stays for so long."""
    is_read = select(batches.c.id).where(batches.c.input_file_id == files.c.id, batches.c.status.in_(READING)).exists()
    expired = select(files.c.id).where(files.c.expires_unix_s <= now, ~is_read).limit(limit)
    return _schedule_deletion(connection, list(connection.execute(expired).scalars()))


def pending_deletion(connection: Connection, limit: int, excluding: Collection[str] = ()) -> list[str]:
    """Some files, none of `excluding`, whose bytes are to be deleted."""
    query = select(files_to_delete.c.id).where(files_to_delete.c.id.not_in(excluding)).limit(limit)
    return list(connection.execute(query).scalars())


def bytes_deleted(connection: Connection, file_id: str) -> None:
    """Note that a doomed file's bytes are gone."""
    connection.execute(delete(files_to_delete).where(files_to_delete.c.id == file_id))


def _schedule_deletion(connection: Connection, file_ids: list[str]) -> int:
    if file_ids:
        connection.execute(delete(files).where(files.c.id.in_(file_ids)))
        connection.execute(insert(files_to_delete), [{"id": file_id} for file_id in file_ids])
    return len(file_ids)


def _visible(tenant: str, now: float) -> ColumnElement[bool]:
    return (files.c.tenant == tenant) & or_(files.c.expires_unix_s.is_(None), files.c.expires_unix_s > now)


def _record(row: Row[Any]) -> FileRecord:
    return FileRecord(**row._mapping)
