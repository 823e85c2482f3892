"""Rows of `responses`: those of one tenant, their conversations, and the room that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, literal, select, update

from replicas.errors import InvalidRequest, Overloaded
from serve_app.jobs.api.errors import UnknownItem, UnknownPreviousResponse, UnknownResponse
from serve_app.jobs.api.records import JobsSettings
from serve_app.jobs.api.responses import (
    EndedResponse,
    ItemPage,
    ItemPageRequest,
    ItemReference,
    NewResponse,
    ResponseEnd,
    ResponseRecord,
    ResponseRun,
    ResponseStatus,
)
from serve_app.jobs.storage.rows.conversations import (
    add_items,
    all_items,
    count_stored,
    get_conversation,
    items_by_id,
    stored_bytes,
    too_much_stored,
)
from serve_app.jobs.storage.schema.tables import UNFINISHED, conversations, responses

_RETRY_AFTER_S = 30.0
_SHOWN_CHARS = 64
_SEPARATOR = "\n"
"""Separator of the items in one text: JSON has no newline outside of its strings, and none within them."""
_FINAL = tuple(status.value for status in ResponseStatus if status.is_final)
_OF_TENANT = (responses.c.id == bindparam("response_id"), responses.c.tenant == bindparam("tenant"))
# Built once: building a statement takes as long as executing it.
_RESPONSE = select(responses).where(*_OF_TENANT)
_NUM_UNFINISHED = select(func.count()).select_from(responses).where(responses.c.tenant == bindparam("tenant"))
_NUM_UNFINISHED = _NUM_UNFINISHED.where(UNFINISHED)
_OLDEST = (
    select(responses.c.number, responses.c.num_bytes)
    .where(responses.c.tenant == bindparam("tenant"), responses.c.status.in_(_FINAL))
    .order_by(responses.c.created_unix_s, responses.c.id)
    .limit(32)
)


def split_items(text: str) -> tuple[str, ...]:
    """Return the items in a column, each as JSON."""
    return tuple(text.split(_SEPARATOR)) if text else ()


def add_response(
    connection: Connection, new: NewResponse, owner: str | None, settings: JobsSettings, now: float
) -> None:
    """Store a response that begins; the tenant's oldest make room for it. One that is there stays as it is.

    Raises:
        UnknownConversation: its conversation does not exist.
        Overloaded: there is no room, or the tenant has too many unfinished responses.
        IntegrityError: as `count_stored`.
    """
    identity = {"response_id": new.id, "tenant": new.tenant}
    if connection.execute(_RESPONSE, identity).first() is not None:
        return
    _check_unfinished(connection, new.tenant, settings.max_unfinished_responses)
    status = ResponseStatus.QUEUED if owner is None else ResponseStatus.IN_PROGRESS
    state = {"status": status.value, "owner": owner, "num_bytes": new.num_bytes, "response": new.response, "output": ""}
    _insert(connection, new, state, settings, now)


def add_ended_response(connection: Connection, ended: EndedResponse, settings: JobsSettings, now: float) -> None:
    """Store a response that has ended; the tenant's oldest make room for it.

    Raises:
        UnknownConversation: its conversation does not exist.
        Overloaded: there is no room.
        IntegrityError: as `count_stored`.
    """
    new, end = ended.new, ended.end
    output = _SEPARATOR.join(end.output)
    num_bytes = new.num_bytes + len(end.response) - len(new.response) + len(output)
    state = {"status": end.status.value, "num_bytes": num_bytes, "response": end.response, "output": output}
    _insert(connection, new, state, settings, now)
    if new.conversation_id is not None:
        add_items(connection, new.tenant, new.conversation_id, (*new.items, *end.output))


def _insert(
    connection: Connection, new: NewResponse, state: Mapping[str, Any], settings: JobsSettings, now: float
) -> None:
    """Store a response in a state, which has `num_bytes`, and make room for it.

    Raises:
        UnknownConversation, Overloaded, IntegrityError: as `add_ended_response`.
    """
    if new.conversation_id is not None:
        get_conversation(connection, new.tenant, new.conversation_id)
    make_room(connection, new.tenant, state["num_bytes"], settings.max_stored_bytes)
    row = {
        "id": new.id, "tenant": new.tenant, "model": settings.model_name, "previous_id": new.previous_id,
        "conversation_id": new.conversation_id, "is_background": int(new.run is not None),
        "created_unix_s": now, "expires_unix_s": now + settings.keep_responses_s,
        "input": _SEPARATOR.join(new.items), "run": None if new.run is None else new.run.plan,
        "prompt": None if new.run is None else new.run.prompt, **state,
    }  # fmt: skip
    connection.execute(insert(responses).values(row))
    count_stored(connection, new.tenant, state["num_bytes"], num_responses=1)


def _check_unfinished(connection: Connection, tenant: str, limit: int) -> None:
    num_unfinished = int(connection.execute(_NUM_UNFINISHED, {"tenant": tenant}).scalar_one())
    if num_unfinished >= limit:
        message = f"{num_unfinished} stored responses have not ended; the limit is {limit}"
        raise Overloaded(message, _RETRY_AFTER_S, "max_responses_per_tenant", "rate_limit_exceeded")


def make_room(connection: Connection, tenant: str, num_bytes: int, limit: int) -> None:
    """Delete a tenant's oldest responses that have ended until it may store `num_bytes` more.

    Raises:
        Overloaded: they would not fit without the responses, either.
    """
    excess = stored_bytes(connection, tenant) + num_bytes - limit
    while excess > 0:
        rows = list(connection.execute(_OLDEST, {"tenant": tenant}))
        if not rows:
            raise too_much_stored(limit + excess, limit)
        old: list[Any] = []
        while rows and excess > 0:
            old.append(rows.pop(0))
            excess -= old[-1].num_bytes
        _delete(connection, tenant, old)


def _delete(connection: Connection, tenant: str, rows: Sequence[Any]) -> None:
    """Delete responses of one tenant, given by number and bytes."""
    connection.execute(delete(responses).where(responses.c.number.in_([row.number for row in rows])))
    count_stored(connection, tenant, -sum(row.num_bytes for row in rows), num_responses=-len(rows))


def get_row(connection: Connection, tenant: str, response_id: str, is_to_change: bool = False) -> Row[Any]:
    """Return the row of a tenant's response, locked until the transaction ends if `is_to_change`.

    Raises:
        UnknownResponse: there is no such response, or it belongs to another tenant.
    """
    query = _RESPONSE.with_for_update() if is_to_change else _RESPONSE
    row = connection.execute(query, {"response_id": response_id, "tenant": tenant}).first()
    if row is None:
        raise UnknownResponse(f"there is no response `{response_id[:_SHOWN_CHARS]}`")
    return row


def response_record(row: Row[Any]) -> ResponseRecord:
    """Return a row as a record."""
    status = ResponseStatus(row.status)
    return ResponseRecord(row.id, status, row.response, split_items(row.output))


def get_run(connection: Connection, tenant: str, response_id: str) -> ResponseRun | None:
    """Return the work of a response; None: it does not run in the background.

    Raises:
        UnknownResponse: as `get_row`.
    """
    row = get_row(connection, tenant, response_id)
    return None if row.run is None else ResponseRun(row.run, row.prompt)


def end_response(connection: Connection, row: Row[Any], end: ResponseEnd, num_delta_bytes: int = 0) -> None:
    """Store the end of a response, whose row is locked, and add its items to its conversation, if it has one."""
    output = _SEPARATOR.join(end.output)
    more = num_delta_bytes + len(end.response) - len(row.response) + len(output)
    values = {"status": end.status.value, "owner": None, "response": end.response, "output": output}
    values["num_bytes"] = row.num_bytes + more
    connection.execute(update(responses).where(responses.c.number == row.number).values(values))
    count_stored(connection, row.tenant, more)
    if row.conversation_id is None or end.status not in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
        return
    is_there = select(conversations.c.id).where(
        conversations.c.id == row.conversation_id, conversations.c.tenant == row.tenant
    )
    if connection.execute(is_there).first() is not None:
        add_items(connection, row.tenant, row.conversation_id, (*split_items(row.input), *end.output))


def end_held(connection: Connection, end: ResponseEnd, owner: str) -> None:
    """Store the end of a response that its owner still holds; another stays as it is."""
    held = (responses.c.id == end.id) & (responses.c.owner == owner)
    row = connection.execute(select(responses).where(held).with_for_update()).first()
    if row is not None:
        end_response(connection, row, end)


def delete_response(connection: Connection, tenant: str, response_id: str) -> None:
    """Delete a response.

    Raises:
        UnknownResponse: as `get_row`.
    """
    _delete(connection, tenant, [get_row(connection, tenant, response_id, is_to_change=True)])


def delete_some(connection: Connection, tenant: str, limit: int) -> int:
    """Delete up to `limit` of a tenant's responses, and return their number."""
    query = select(responses.c.number, responses.c.num_bytes).where(responses.c.tenant == tenant)
    rows = connection.execute(query.limit(limit).with_for_update()).all()
    _delete(connection, tenant, rows)
    return len(rows)


def cancel_response(connection: Connection, tenant: str, response_id: str) -> ResponseRecord:
    """End a response in the background as cancelled; one that has ended stays as it is.

    Raises:
        UnknownResponse: as `get_row`.
        InvalidRequest: its client waits for it.
    """
    row = get_row(connection, tenant, response_id, is_to_change=True)
    if ResponseStatus(row.status).is_final:
        return response_record(row)
    if not row.is_background:
        message = f"response `{response_id}` was not created with `background`; its client can only leave"
        raise InvalidRequest(message, "response_id")
    values = {"status": ResponseStatus.CANCELLED.value, "owner": None}
    connection.execute(update(responses).where(responses.c.number == row.number).values(values))
    return response_record(get_row(connection, tenant, response_id))


def list_items(connection: Connection, tenant: str, response_id: str, page: ItemPageRequest) -> ItemPage:
    """Return a page of the input items of a response; none if `page.after` is unknown.

    Raises:
        UnknownResponse: as `get_row`.
    """
    items = split_items(get_row(connection, tenant, response_id).input)
    items = items if page.is_ascending else items[::-1]
    if page.after is not None:
        ids = [from_json(item)["id"] for item in items]
        items = items[ids.index(page.after) + 1 :] if page.after in ids else ()
    return ItemPage(items[: page.limit], len(items) > page.limit)


def find_items(connection: Connection, tenant: str, references: Sequence[ItemReference]) -> tuple[str, ...]:
    """Return a tenant's items with some ids, from its conversations and responses.

    Raises:
        UnknownItem: one of them is not stored.
    """
    found = items_by_id(connection, tenant, [reference.item_id for reference in references])
    response_ids = {one.response_id for one in references if one.response_id and one.item_id not in found}
    columns = select(responses.c.input, responses.c.output)
    for row in connection.execute(columns.where(responses.c.id.in_(response_ids), responses.c.tenant == tenant)):
        for item in (*split_items(row.input), *split_items(row.output)):
            found.setdefault(from_json(item)["id"], item)
    missing = next((one.item_id for one in references if one.item_id not in found), None)
    if missing is not None:
        raise UnknownItem(f"there is no stored item `{missing[:_SHOWN_CHARS]}`")
    return tuple(found[reference.item_id] for reference in references)


def conversation_before(
    connection: Connection, tenant: str, response_id: str | None, conversation_id: str | None
) -> tuple[str, ...]:
    """Return the items of the conversation up to a response, or else of a conversation object, or else none.

    Raises:
        UnknownPreviousResponse, InvalidRequest: as `history`.
        UnknownConversation: as `get_conversation`.
    """
    if response_id is not None:
        return history(connection, tenant, response_id)
    return () if conversation_id is None else all_items(connection, tenant, conversation_id)


def history(connection: Connection, tenant: str, response_id: str) -> tuple[str, ...]:
    """Return the items of the conversation up to a response and with its output, the oldest first.

    Raises:
        UnknownPreviousResponse: the response, or one before it, is not there.
        InvalidRequest: the response has not ended, or belongs to a conversation object.
    """
    columns = (responses.c.id, responses.c.previous_id, responses.c.input, responses.c.output)
    own = responses.c.tenant == tenant
    chain = select(*columns, literal(0).label("age")).where(responses.c.id == response_id, own).cte(recursive=True)
    before = select(*columns, chain.c.age + 1).where(responses.c.id == chain.c.previous_id, own)
    chain = chain.union_all(before)
    rows = connection.execute(select(chain).order_by(chain.c.age.desc())).all()
    if not rows or rows[0].previous_id is not None:
        missing = response_id if not rows else rows[0].previous_id
        raise UnknownPreviousResponse(f"there is no response `{missing[:_SHOWN_CHARS]}` to continue")
    _check_can_continue(get_row(connection, tenant, response_id))
    return tuple(item for row in rows for text in (row.input, row.output) for item in split_items(text))


def _check_can_continue(row: Row[Any]) -> None:
    if not ResponseStatus(row.status).is_final:
        message = f"response `{row.id}` is {row.status}; it can be continued when it has ended"
        raise InvalidRequest(message, "previous_response_id")
    if row.conversation_id is not None:
        message = f"response `{row.id}` belongs to a conversation; send `conversation` instead"
        raise InvalidRequest(message, "previous_response_id")


def expire_responses(connection: Connection, now: float, limit: int) -> int:
    """Delete up to `limit` responses that have ended and whose time is over, and return their number."""
    expired = (
        select(responses.c.number, responses.c.num_bytes, responses.c.tenant)
        .where(responses.c.expires_unix_s <= now, responses.c.status.in_(_FINAL))
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows: Sequence[Any] = connection.execute(expired).all()
    for tenant in sorted({row.tenant for row in rows}):
        _delete(connection, tenant, [row for row in rows if row.tenant == tenant])
    return len(rows)
