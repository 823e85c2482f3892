"""Records of stored responses and conversations, and the interface of their store to ingresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

JsonObject = dict[str, Any]


class ResponseStatus(Enum):
    """Status of a response, in OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if the status never changes again."""
        return self not in (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """Work of a response in the background, fixed when it was accepted."""

    plan: str
    """JSON of the request and of what its events need."""
    prompt: bytes
    """Token ids of the prompt, 4 bytes each, little endian."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """Response to be stored."""

    id: str
    tenant: str
    response: str
    """JSON of the response as it begins."""
    items: tuple[str, ...]
    """JSON of the request's own input items; each has an id."""
    previous_id: str | None = None
    """Response whose conversation it continues."""
    conversation_id: str | None = None
    """Conversation to which its items are added when it ends."""
    run: ResponseRun | None = None
    """Work in the background; None: an ingress answers while its client waits."""

    @property
    def num_bytes(self) -> int:
        """Bytes that count for the tenant."""
        own = len(self.response) + sum(map(len, self.items))
        return own if self.run is None else own + len(self.run.plan) + len(self.run.prompt)


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """End of a response."""

    id: str
    status: ResponseStatus
    response: str
    """JSON of the whole response, without its output."""
    output: tuple[str, ...]
    """JSON of the output's items."""


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """Response of a batch's line, which is stored when it has ended."""

    new: NewResponse
    end: ResponseEnd


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Stored response in its present state."""

    id: str
    status: ResponseStatus
    response: str
    """JSON of the response as it was stored last."""
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """Output of a response in the background that was committed together; readers see it as one delta."""

    position: int
    """Number of the delta, from 0."""
    token_ids: bytes
    """4 bytes each, little endian."""
    text: str
    finish: str | None = None
    """Reason for the end, on the last delta alone."""


@dataclass(frozen=True, slots=True)
class ResponseProgress:
    """Part of a response's output that a reader has not seen yet."""

    record: ResponseRecord
    deltas: tuple[StoredDelta, ...]
    has_more: bool
    """True if more deltas are stored than these."""


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """Conversation, without its items."""

    id: str
    created_unix_s: float
    metadata: str
    """JSON object."""


@dataclass(frozen=True, slots=True)
class ItemPageRequest:
    """Request for a part of a list of items."""

    limit: int
    after: str | None = None
    is_ascending: bool = False


@dataclass(frozen=True, slots=True)
class ItemReference:
    """Reference to a stored item."""

    item_id: str
    response_id: str | None
    """Response that has the item if no conversation has it; None: none."""


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Part of a list of items, each as JSON."""

    items: tuple[str, ...]
    has_more: bool


class ResponsesService(Protocol):
    """Store of responses and conversations. An id of another tenant is treated as unknown.

    A method that ends or changes something may be repeated with the same arguments, and then changes nothing.
    """

    async def content_key(self) -> bytes:
        """Return the key of the items' encrypted contents, which is the same in every process and after restarts."""

    async def begin_response(self, new: NewResponse, owner: str | None) -> None:
        """Store a response durably. `owner` is the ingress that answers; None: it runs in the background.

        Raises:
            UnknownResponse, UnknownConversation: what it continues does not exist.
            Overloaded: the tenant would store more bytes, or have more unfinished responses, than it may.
        """

    async def end_response(self, end: ResponseEnd, owner: str) -> None:
        """Store the end of a response that an ingress answers; one that the ingress has lost stays as it is."""

    async def hold_responses(self, owner: str, is_busy: bool) -> None:
        """Note that an ingress lives, and that responses of it run (`is_busy`); otherwise it is forgotten."""

    async def response(self, tenant: str, response_id: str) -> ResponseRecord:
        """Return a response in its present state."""

    async def response_run(self, tenant: str, response_id: str) -> ResponseRun | None:
        """Return the work of a response; None: it does not run in the background."""

    async def follow_response(self, tenant: str, response_id: str, after: int, timeout_s: float) -> ResponseProgress:
        """Return the deltas behind number `after` (-1: from the first).

        It waits until there are some, or the response has ended, at most `timeout_s`.
        """

    async def delete_response(self, tenant: str, response_id: str) -> None:
        """Delete a response; one that runs is stopped."""

    async def cancel_response(self, tenant: str, response_id: str) -> ResponseRecord:
        """Cancel a response in the background and return it; one that has ended stays as it is.

        Raises:
            InvalidRequest: its client waits for it.
        """

    async def response_items(self, tenant: str, response_id: str, page: ItemPageRequest) -> ItemPage:
        """Return a page of the input items of a response."""

    async def history(self, tenant: str, response_id: str | None, conversation_id: str | None) -> tuple[str, ...]:
        """Return the items of the conversation up to a response, its output included, or of a conversation object.

        Raises:
            UnknownResponse: a response of the conversation does not exist.
            InvalidRequest: the response has not ended.
        """

    async def find_items(self, tenant: str, references: Sequence[ItemReference]) -> tuple[str, ...]:
        """Return the items of a tenant's responses and conversations with some ids.

        Raises:
            UnknownItem: one of them is not stored.
        """

    async def create_conversation(self, tenant: str, conversation: ConversationRecord, items: Sequence[str]) -> None:
        """Store a new conversation with its first items."""

    async def conversation(self, tenant: str, conversation_id: str) -> ConversationRecord:
        """Return a conversation."""

    async def change_conversation(self, tenant: str, conversation_id: str, metadata: str) -> ConversationRecord:
        """Replace the metadata of a conversation and return it."""

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation and its items."""

    async def add_items(self, tenant: str, conversation_id: str, items: Sequence[str]) -> None:
        """Add items behind those of a conversation; an item whose id it has already is left as it is."""

    async def conversation_items(self, tenant: str, conversation_id: str, page: ItemPageRequest) -> ItemPage:
        """Return a page of the items of a conversation."""

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> str:
        """Return an item of a conversation."""

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationRecord:
        """Delete an item of a conversation, and return the conversation."""

    async def stored_by_tenant(self, tenant: str | None = None) -> Mapping[str, StoredSize]:
        """Return the size of what each tenant has stored, or of what one has."""

    async def delete_stored(self, tenant: str) -> StoredSize:
        """Delete all that a tenant has stored, and return its size before."""


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Size of what a tenant has stored."""

    num_responses: int
    num_conversations: int
    num_bytes: int
    oldest_unix_s: float | None
    """Creation of the oldest response; None: there is none."""


@dataclass(frozen=True, slots=True)
class StoredSums:
    """Size of what all tenants have stored together, and of what those with most have."""

    total: StoredSize
    num_tenants: int
    """Tenants that have something stored."""
    largest: Mapping[str, StoredSize]
    """Sizes of the tenants with most bytes, the largest first."""
