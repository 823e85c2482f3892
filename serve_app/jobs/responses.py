"""Store of responses and conversations in a database, for ingresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from serve_app.jobs.api.responses import (
    ConversationRecord,
    ItemPage,
    ItemPageRequest,
    ItemReference,
    NewResponse,
    ResponseEnd,
    ResponseProgress,
    ResponseRecord,
    ResponseRun,
    StoredSize,
)
from serve_app.jobs.lifecycle.state_loops import BatchEvents
from serve_app.jobs.storage.ownership import add_owner, heartbeat, reap_owner
from serve_app.jobs.storage.response_outputs import read_progress
from serve_app.jobs.storage.rows import conversations, responses
from serve_app.jobs.storage.schema.database import JobsContext

ResultT = TypeVar("ResultT")

_NUM_AT_ONCE = 100
"""Most responses or conversations that one transaction deletes."""

_RECHECK_S = 0.2
"""Seconds to the next read of a response that a reader follows and that another worker may run."""


class SqlResponses:
    """Responses and conversations in a database: `ResponsesService`."""

    def __init__(self, context: JobsContext, events: BatchEvents, on_waiting: Callable[[], None]) -> None:
        """`events` wake the readers of a response; `on_waiting` is called when one waits to be run."""
        self._context = context
        self._database = context.database
        self._now = context.clock.unix
        self._events = events
        self._on_waiting = on_waiting

    async def _write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run a write transaction; again if another process added the first row of a tenant at the same time."""
        try:
            return await self._database.write(work)
        except IntegrityError:
            return await self._database.write(work)

    async def content_key(self) -> bytes:
        """Return the key of encrypted contents."""
        return self._context.content_key

    async def begin_response(self, new: NewResponse, owner: str | None) -> None:
        """Store a response durably."""
        settings, now = self._context.settings, self._now()

        def begin(connection: Connection) -> None:
            if owner is not None and not heartbeat(connection, owner, now):
                add_owner(connection, owner, now)
            responses.add_response(connection, new, owner, settings, now)

        await self._write(begin)
        if owner is None:
            self._on_waiting()

    async def end_response(self, end: ResponseEnd, owner: str) -> None:
        """Store the end of a response that an ingress answers."""
        await self._write(lambda c: responses.end_held(c, end, owner))

    async def hold_responses(self, owner: str, is_busy: bool) -> None:
        """Note that an ingress lives, or forget one that answers no stored response."""
        now = self._now()
        await self._database.write(lambda c: heartbeat(c, owner, now) if is_busy else reap_owner(c, owner))

    async def response(self, tenant: str, response_id: str) -> ResponseRecord:
        """Return a response in its present state."""
        return await self._database.read(lambda c: responses.response_record(responses.get_row(c, tenant, response_id)))

    async def response_run(self, tenant: str, response_id: str) -> ResponseRun | None:
        """Return the work of a response; None: it does not run in the background."""
        return await self._database.read(lambda c: responses.get_run(c, tenant, response_id))

    async def follow_response(self, tenant: str, response_id: str, after: int, timeout_s: float) -> ResponseProgress:
        """Return the deltas behind number `after`, as soon as there are some or the response has ended."""
        monotonic = self._context.clock.monotonic
        end_s = monotonic() + timeout_s
        with self._events.watch(response_id) as changed:
            while True:
                progress = await self._database.read(lambda c: read_progress(c, tenant, response_id, after))
                left_s = end_s - monotonic()
                if progress.deltas or progress.record.status.is_final or left_s <= 0:
                    return progress
                await changed.wait(min(left_s, _RECHECK_S))

    async def delete_response(self, tenant: str, response_id: str) -> None:
        """Delete a response; one that runs is stopped."""
        await self._write(lambda c: responses.delete_response(c, tenant, response_id))
        self._events.ended(response_id)

    async def cancel_response(self, tenant: str, response_id: str) -> ResponseRecord:
        """Cancel a response in the background and return it."""
        record = await self._write(lambda c: responses.cancel_response(c, tenant, response_id))
        self._events.ended(response_id)
        return record

    async def response_items(self, tenant: str, response_id: str, page: ItemPageRequest) -> ItemPage:
        """Return a page of the input items of a response."""
        return await self._database.read(lambda c: responses.list_items(c, tenant, response_id, page))

    async def history(self, tenant: str, response_id: str | None, conversation_id: str | None) -> tuple[str, ...]:
        """Return the items of the conversation up to a response, or of a conversation object."""
        return await self._database.read(
            lambda c: responses.conversation_before(c, tenant, response_id, conversation_id)
        )

    async def find_items(self, tenant: str, references: Sequence[ItemReference]) -> tuple[str, ...]:
        """Return the items of a tenant's responses and conversations with some ids."""
        return await self._database.read(lambda c: responses.find_items(c, tenant, references))

    async def create_conversation(self, tenant: str, conversation: ConversationRecord, items: Sequence[str]) -> None:
        """Store a new conversation with its first items."""
        num_bytes = len(conversation.metadata) + sum(map(len, items))

        def create(connection: Connection) -> None:
            responses.make_room(connection, tenant, num_bytes, self._context.settings.max_stored_bytes)
            if conversations.add_conversation(connection, tenant, conversation):
                conversations.add_items(connection, tenant, conversation.id, items)

        await self._write(create)

    async def conversation(self, tenant: str, conversation_id: str) -> ConversationRecord:
        """Return a conversation."""
        return await self._database.read(
            lambda c: conversations.conversation_record(conversations.get_conversation(c, tenant, conversation_id))
        )

    async def change_conversation(self, tenant: str, conversation_id: str, metadata: str) -> ConversationRecord:
        """Replace the metadata of a conversation and return it."""
        return await self._write(lambda c: conversations.change_metadata(c, tenant, conversation_id, metadata))

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation and its items."""
        await self._write(lambda c: conversations.delete_conversation(c, tenant, conversation_id))

    async def add_items(self, tenant: str, conversation_id: str, items: Sequence[str]) -> None:
        """Add items behind those of a conversation."""
        limit = self._context.settings.max_stored_bytes

        def add(connection: Connection) -> None:
            conversations.get_conversation(connection, tenant, conversation_id)
            responses.make_room(connection, tenant, sum(map(len, items)), limit)
            conversations.add_items(connection, tenant, conversation_id, items)

        await self._write(add)

    async def conversation_items(self, tenant: str, conversation_id: str, page: ItemPageRequest) -> ItemPage:
        """Return a page of the items of a conversation."""
        return await self._database.read(lambda c: conversations.list_items(c, tenant, conversation_id, page))

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> str:
        """Return an item of a conversation."""
        return await self._database.read(lambda c: conversations.find_item(c, tenant, conversation_id, item_id))

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationRecord:
        """Delete an item of a conversation, and return the conversation."""
        return await self._write(lambda c: conversations.delete_item(c, tenant, conversation_id, item_id))

    async def stored_by_tenant(self, tenant: str | None = None) -> Mapping[str, StoredSize]:
        """Return the size of what each tenant has stored, or of what one has."""
        return await self._database.read(lambda c: conversations.stored_sizes(c, tenant))

    async def delete_stored(self, tenant: str) -> StoredSize:
        """Delete all that a tenant has stored, and return its size before; what runs is stopped."""
        size = (await self.stored_by_tenant(tenant)).get(tenant, StoredSize(0, 0, 0, None))
        for delete_some in (responses.delete_some, conversations.delete_some):
            while await self._write(partial(delete_some, tenant=tenant, limit=_NUM_AT_ONCE)):
                pass
        return size
