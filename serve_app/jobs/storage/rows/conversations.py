"""Rows of `conversations` and their items, and the sums of what each tenant has stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from replicas.errors import Overloaded
from serve_app.jobs.api.errors import UnknownConversation, UnknownItem
from serve_app.jobs.api.responses import ConversationRecord, ItemPage, ItemPageRequest, StoredSize, StoredSums
from serve_app.jobs.storage.schema.tables import conversation_items, conversations, responses, stored

_RETRY_AFTER_S = 60.0
_SHOWN_CHARS = 64
_SUMS = ("num_responses", "num_conversations", "num_bytes")


def count_stored(
    connection: Connection, tenant: str, num_bytes: int, num_responses: int = 0, num_conversations: int = 0
) -> None:
    """Add to a tenant's sums.

    Raises:
        IntegrityError: another process has added the tenant's first row at the same time; a repetition succeeds.
    """
    sums = {"num_bytes": num_bytes, "num_responses": num_responses, "num_conversations": num_conversations}
    added = {name: stored.c[name] + value for name, value in sums.items()}
    if connection.execute(update(stored).where(stored.c.tenant == tenant).values(added)).rowcount == 0:
        connection.execute(insert(stored).values(tenant=tenant, **sums))


def stored_bytes(connection: Connection, tenant: str) -> int:
    """Return the bytes that a tenant has stored, and lock their sum until the transaction ends."""
    query = select(stored.c.num_bytes).where(stored.c.tenant == tenant).with_for_update()
    return int(connection.execute(query).scalar() or 0)


def too_much_stored(num_bytes: int, limit: int) -> Overloaded:
    """Return the refusal of what does not fit beside what a tenant keeps."""
    message = f"the tenant would store {num_bytes} bytes of responses and conversations; `max_stored_bytes` is {limit}"
    return Overloaded(message, _RETRY_AFTER_S, "max_stored_bytes", "storage_limit_exceeded")


_OLDEST_OF_TENANT = select(func.min(responses.c.created_unix_s)).where(responses.c.tenant == stored.c.tenant)
_SIZES = select(stored, _OLDEST_OF_TENANT.scalar_subquery().label("oldest"))
_TOTAL = select(
    func.count().label("num_tenants"),
    *(func.coalesce(func.sum(stored.c[name]), 0).label(name) for name in _SUMS),
    # Responses expire in the order of their creation.
    select(responses.c.created_unix_s).order_by(responses.c.expires_unix_s).limit(1).scalar_subquery().label("oldest"),
).where(stored.c.num_bytes > 0)


def stored_sizes(connection: Connection, tenant: str | None = None) -> dict[str, StoredSize]:
    """Return what each tenant has stored, or what one has."""
    of_tenant = () if tenant is None else (stored.c.tenant == tenant,)
    rows = connection.execute(_SIZES.where(*of_tenant).order_by(stored.c.tenant))
    return {row.tenant: _size_of(row) for row in rows}


def stored_sums(connection: Connection, num_largest: int) -> StoredSums:
    """Return what all tenants have stored together, and what those with most bytes have."""
    total = connection.execute(_TOTAL).one()
    largest = connection.execute(
        _SIZES.where(stored.c.num_bytes > 0).order_by(stored.c.num_bytes.desc()).limit(num_largest)
    )
    return StoredSums(_size_of(total), total.num_tenants, {row.tenant: _size_of(row) for row in largest})


def _size_of(row: Row[Any]) -> StoredSize:
    return StoredSize(int(row.num_responses), int(row.num_conversations), int(row.num_bytes), row.oldest)


def add_conversation(connection: Connection, tenant: str, conversation: ConversationRecord) -> bool:
    """Store a conversation without items; return False if it is there already."""
    if connection.execute(select(conversations.c.id).where(conversations.c.id == conversation.id)).first() is not None:
        return False
    num_bytes = len(conversation.metadata)
    row = {"id": conversation.id, "tenant": tenant, "metadata": conversation.metadata, "num_items": 0}
    row |= {"created_unix_s": conversation.created_unix_s, "num_bytes": num_bytes}
    connection.execute(insert(conversations).values(row))
    count_stored(connection, tenant, num_bytes, num_conversations=1)
    return True


def get_conversation(connection: Connection, tenant: str, conversation_id: str, is_to_change: bool = False) -> Row[Any]:
    """Return the row of a tenant's conversation, locked until the transaction ends if `is_to_change`.

    Raises:
        UnknownConversation: there is no such conversation, or it belongs to another tenant.
    """
    query: Select[Any] = select(conversations).where(
        conversations.c.id == conversation_id, conversations.c.tenant == tenant
    )
    row = connection.execute(query.with_for_update() if is_to_change else query).first()
    if row is None:
        raise UnknownConversation(f"there is no conversation `{conversation_id[:_SHOWN_CHARS]}`")
    return row


def conversation_record(row: Row[Any]) -> ConversationRecord:
    """Return a conversation's row as a record."""
    return ConversationRecord(row.id, row.created_unix_s, row.metadata)


def change_metadata(connection: Connection, tenant: str, conversation_id: str, metadata: str) -> ConversationRecord:
    """Replace the metadata of a conversation.

    Raises:
        UnknownConversation: as `get_conversation`.
    """
    row = get_conversation(connection, tenant, conversation_id, is_to_change=True)
    more = len(metadata) - len(row.metadata)
    values = {"metadata": metadata, "num_bytes": row.num_bytes + more}
    connection.execute(update(conversations).where(conversations.c.id == row.id).values(values))
    count_stored(connection, tenant, more)
    return ConversationRecord(row.id, row.created_unix_s, metadata)


def delete_conversation(connection: Connection, tenant: str, conversation_id: str) -> None:
    """Delete a conversation and its items.

    Raises:
        UnknownConversation: as `get_conversation`.
    """
    row = get_conversation(connection, tenant, conversation_id, is_to_change=True)
    connection.execute(delete(conversations).where(conversations.c.id == row.id))
    count_stored(connection, tenant, -row.num_bytes, num_conversations=-1)


def delete_some(connection: Connection, tenant: str, limit: int) -> int:
    """Delete up to `limit` of a tenant's conversations, and return their number."""
    query = select(conversations.c.id).where(conversations.c.tenant == tenant).limit(limit)
    ids = connection.execute(query).scalars().all()
    for conversation_id in ids:
        delete_conversation(connection, tenant, conversation_id)
    return len(ids)


def add_items(connection: Connection, tenant: str, conversation_id: str, items: Sequence[str]) -> int:
    """Add items to a conversation, except those whose ids it has; return the bytes added.

    Raises:
        UnknownConversation: as `get_conversation`.
    """
    row = get_conversation(connection, tenant, conversation_id, is_to_change=True)
    by_id = {str(from_json(item)["id"]): item for item in items}
    known = select(conversation_items.c.id).where(
        conversation_items.c.conversation_id == row.id, conversation_items.c.id.in_(by_id)
    )
    for item_id in connection.execute(known).scalars().all():
        del by_id[item_id]
    if not by_id:
        return 0
    common = {"conversation_id": row.id, "tenant": tenant}
    new = [
        {**common, "position": position, "id": item_id, "item": item}
        for position, (item_id, item) in enumerate(by_id.items(), row.num_items)
    ]
    connection.execute(insert(conversation_items), new)
    more = sum(map(len, by_id.values()))
    values = {"num_items": row.num_items + len(by_id), "num_bytes": row.num_bytes + more}
    connection.execute(update(conversations).where(conversations.c.id == row.id).values(values))
    count_stored(connection, tenant, more)
    return more


def list_items(connection: Connection, tenant: str, conversation_id: str, page: ItemPageRequest) -> ItemPage:
    """Return a page of a conversation's items; none if `page.after` is unknown.

    Raises:
        UnknownConversation: as `get_conversation`.
    """
    get_conversation(connection, tenant, conversation_id)
    position = conversation_items.c.position
    condition = (conversation_items.c.conversation_id == conversation_id) & (conversation_items.c.tenant == tenant)
    query = select(conversation_items.c.item).where(condition)
    if page.after is not None:
        last = select(position).where(condition, conversation_items.c.id == page.after).scalar_subquery()
        query = query.where(position > last if page.is_ascending else position < last)
    query = query.order_by(position.asc() if page.is_ascending else position.desc()).limit(page.limit + 1)
    items = connection.execute(query).scalars().all()
    return ItemPage(tuple(items[: page.limit]), len(items) > page.limit)


def all_items(connection: Connection, tenant: str, conversation_id: str) -> tuple[str, ...]:
    """Return all items of a conversation in order.

    Raises:
        UnknownConversation: as `get_conversation`.
    """
    get_conversation(connection, tenant, conversation_id)
    query = select(conversation_items.c.item).where(
        conversation_items.c.conversation_id == conversation_id, conversation_items.c.tenant == tenant
    )
    return tuple(connection.execute(query.order_by(conversation_items.c.position)).scalars())


def items_by_id(connection: Connection, tenant: str, item_ids: Sequence[str]) -> dict[str, str]:
    """Return those of these items that a tenant's conversations have; of several with one id any."""
    query = select(conversation_items.c.id, conversation_items.c.item).where(
        conversation_items.c.tenant == tenant, conversation_items.c.id.in_(item_ids)
    )
    return {row.id: row.item for row in connection.execute(query)}


def find_item(connection: Connection, tenant: str, conversation_id: str, item_id: str) -> str:
    """Return an item of a conversation.

    Raises:
        UnknownItem: there is no such item, or it belongs to another tenant.
    """
    query = select(conversation_items.c.item).where(
        conversation_items.c.conversation_id == conversation_id,
        conversation_items.c.id == item_id,
        conversation_items.c.tenant == tenant,
    )
    item: str | None = connection.execute(query).scalar()
    if item is None:
        raise UnknownItem(f"the conversation has no item `{item_id[:_SHOWN_CHARS]}`")
    return item


def delete_item(connection: Connection, tenant: str, conversation_id: str, item_id: str) -> ConversationRecord:
    """Delete an item of a conversation, and return the conversation.

    Raises:
        UnknownConversation, UnknownItem: as `get_conversation` and `find_item`.
    """
    row = get_conversation(connection, tenant, conversation_id, is_to_change=True)
    less = len(find_item(connection, tenant, conversation_id, item_id))
    connection.execute(
        delete(conversation_items).where(
            conversation_items.c.conversation_id == conversation_id, conversation_items.c.id == item_id
        )
    )
    values = {"num_bytes": row.num_bytes - less}
    connection.execute(update(conversations).where(conversations.c.id == row.id).values(values))
    count_stored(connection, tenant, -less)
    return conversation_record(row)
