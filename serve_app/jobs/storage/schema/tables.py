"""Tables of the database, and pages of their rows in order of creation (keyset pagination).

Times are unix seconds; JSON is stored as text, since no query reads its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    select,
    text,
    tuple_,
)

from serve_app.jobs.api.records import Page, PageRequest

ItemT = TypeVar("ItemT")
metadata = MetaData()
ID = String(64)

files = Table(
    "files",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_unix_s", Double, nullable=False),
    Column("expires_unix_s", Double),
    Index("files_by_tenant", "tenant", "created_unix_s", "id"),
    Index("files_by_expiry", "expires_unix_s"),
)

files_to_delete = Table("doomed_files", metadata, Column("id", ID, primary_key=True))
"""Files without a record whose bytes are still in the store."""

owners = Table(
    "owners",
    metadata,
    Column("id", ID, primary_key=True),
    Column("heartbeat_unix_s", Double, nullable=False),
    Column("model", Text),  # whose lines it runs
    Column("speed", Text),  # `Speed` as JSON, from its last heartbeat
)
"""Workers that hold lines, batches or deliveries. A worker whose heartbeat stops loses all of them, and its row, in one
transaction."""

batches = Table(
    "batches",
    metadata,
    Column("id", ID, primary_key=True),
    Column("model", Text, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("tenant", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("band", Integer, nullable=False),
    Column("band_ceiling", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("ending", String(16)),  # final status that a closing batch will have
    Column("owner", ID),  # process that validates or closes the batch
    Column("input_file_id", ID),
    Column("output_file_id", ID),  # chosen when closing begins, so that a repeated closing writes the same file
    Column("error_file_id", ID),
    Column("errors", Text),
    Column("metadata", Text),
    Column("callback_url", Text),
    Column("request_id", Text),
    Column("output_expires_after_s", Double),
    Column("created_unix_s", Double, nullable=False),
    Column("expires_unix_s", Double),
    Column("in_progress_unix_s", Double),
    Column("finalizing_unix_s", Double),
    Column("completed_unix_s", Double),
    Column("failed_unix_s", Double),
    Column("expired_unix_s", Double),
    Column("cancelling_unix_s", Double),
    Column("cancelled_unix_s", Double),
    Column("num_lines", Integer, nullable=False),
    Column("num_queued", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("num_undone", Integer, nullable=False, server_default="0"),  # failed ones that the end of the batch ended
    Column("waiting_tokens", BigInteger, nullable=False),  # expected tokens of lines that have not ended
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("num_cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("traceparent", Text),  # span that asked for the batch, as W3C's headers have it
    Column("tracestate", Text),
    Index("batches_by_tenant", "tenant", "kind", "created_unix_s", "id"),
    Index("batches_by_status", "status", "tenant"),
    Index("batches_by_input", "input_file_id"),
)
_owned, _ending = batches.c.owner.isnot(None), batches.c.ending.isnot(None)
Index("batches_by_owner", batches.c.owner, sqlite_where=_owned, postgresql_where=_owned)
Index("batches_by_ending", batches.c.ending, sqlite_where=_ending, postgresql_where=_ending)

lines = Table(
    "lines",
    metadata,
    Column("batch_id", ID, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("custom_id", Text, nullable=False),
    Column("body", Text),  # None once the line has ended
    Column("expected_tokens", Integer, nullable=False),
    Column("length_rank", Integer, nullable=False),
    Column("prefix_key", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("owner", ID),  # set if and only if the line is running
    Column("attempt", Integer, nullable=False),
    Column("status_code", Integer),
    Column("response", Text),
    Column("error", Text),
    PrimaryKeyConstraint("batch_id", "position"),
    UniqueConstraint("batch_id", "custom_id", name="lines_custom_id"),
    Index("lines_to_lease", "batch_id", "status", "length_rank", "prefix_key", "position"),
)
Index(
    "lines_by_owner", lines.c.owner, sqlite_where=lines.c.owner.isnot(None), postgresql_where=lines.c.owner.isnot(None)
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("digest", Text),
    Column("batch_id", ID, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    PrimaryKeyConstraint("tenant", "key"),
    Index("idempotency_keys_by_batch", "batch_id"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", ID, primary_key=True),
    Column("batch_id", ID, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    Column("event", String(32), nullable=False),
    Column("url", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("created_unix_s", Double, nullable=False),
    Column("next_attempt_unix_s", Double),  # None: delivered or dead
    Column("delivered_unix_s", Double),
    Column("error", Text),
    Column("owner", ID),  # set if and only if a worker makes an attempt
    Index("deliveries_by_batch", "batch_id"),
    Index("deliveries_by_next_attempt", "next_attempt_unix_s"),
)
_sent = deliveries.c.owner.isnot(None)
Index("deliveries_by_owner", deliveries.c.owner, sqlite_where=_sent, postgresql_where=_sent)

usage = Table(
    "usage",
    metadata,
    Column("day", String(10), nullable=False),  # YYYY-MM-DD in UTC
    Column("tenant", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("band", Integer, nullable=False),
    Column("num_requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("computed_tokens", BigInteger, nullable=False),
    Column("wasted_tokens", BigInteger, nullable=False),
    Column("device_s", Double, nullable=False),
    PrimaryKeyConstraint("day", "tenant", "model", "band"),
    Index("usage_by_tenant", "tenant", "day"),
)

usage_reporters = Table(
    "usage_reporters",
    metadata,
    Column("id", ID, primary_key=True),
    Column("number", Integer, nullable=False),  # of its last report that was counted
    Column("reported_unix_s", Double, nullable=False),
    Index("usage_reporters_by_time", "reported_unix_s"),
)
"""Processes that report usage, so that a report that comes again counts once."""


NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Type of a number that the database counts up: in SQLite only an INTEGER key does."""

conversations = Table(
    "conversations",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("created_unix_s", Double, nullable=False),
    Column("num_items", Integer, nullable=False),  # that it has ever had: position of the next one
    Column("num_bytes", BigInteger, nullable=False),
    Index("conversations_by_tenant", "tenant", "created_unix_s", "id"),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", ID, ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("id", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("item", Text, nullable=False),
    PrimaryKeyConstraint("conversation_id", "position"),
    UniqueConstraint("conversation_id", "id", name="conversation_items_id"),
    Index("conversation_items_by_id", "tenant", "id"),
)

responses = Table(
    "responses",
    metadata,
    Column("number", NUMBER, primary_key=True),  # short key of the response's deltas
    Column("id", ID, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("model", Text, nullable=False),  # whose workers run it in the background
    Column("previous_id", ID),
    Column("conversation_id", ID),
    Column("status", String(16), nullable=False),
    Column("is_background", Integer, nullable=False),
    Column("owner", ID),  # set if and only if the response is in progress
    Column("created_unix_s", Double, nullable=False),
    Column("expires_unix_s", Double, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("input", Text, nullable=False),  # items of its own
    Column("response", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("run", Text),
    Column("prompt", LargeBinary),
    UniqueConstraint("id", name="responses_id"),
    Index("responses_by_tenant", "tenant", "created_unix_s", "id"),
    Index("responses_by_expiry", "expires_unix_s"),
)
QUEUED, UNFINISHED = text("status = 'queued'"), text("status IN ('queued', 'in_progress')")
"""Conditions of partial indexes; SQLite uses such an index where a query has its condition word for word."""
_held = responses.c.owner.isnot(None)
Index("responses_by_owner", responses.c.owner, sqlite_where=_held, postgresql_where=_held)
Index("responses_to_run", responses.c.model, responses.c.number, sqlite_where=QUEUED, postgresql_where=QUEUED)
Index("responses_unfinished", responses.c.tenant, sqlite_where=UNFINISHED, postgresql_where=UNFINISHED)

response_deltas = Table(
    "response_deltas",
    metadata,
    Column("response", NUMBER, ForeignKey("responses.number", ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("text", Text, nullable=False),
    Column("finish", String(16)),  # of the last one
    PrimaryKeyConstraint("response", "position"),
    sqlite_with_rowid=False,
)
"""Outputs of responses in the background; each row is one delta, so that every reader sees the same ones.

A token takes 4 bytes and those of its text. No bound follows from that: a vocabulary may have tokens of hundreds of
characters. The text is stored since only replicas have the detokenizer that holds back what may begin a stop string.
"""

stored = Table(
    "stored",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("num_responses", BigInteger, nullable=False),
    Column("num_conversations", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)
"""Sums of each tenant's responses and conversations: a limit that counted them would take longer the more there are."""


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
