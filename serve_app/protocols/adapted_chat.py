"""Request of another protocol as a chat: the chat's body, and the kind of its reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from replicas.errors import InvalidRequest
from serve_app.openai.reply.chat_format import ReplyKind
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.conversation import MessageList
from serve_app.openai.request.parsing import invalid_request
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.request.validation import ContextExceeded
from serve_app.openai.service import CompletionService

_STEP = re.compile(r"[.\[]")
"""Begin of a step in the path of a field."""


@dataclass(frozen=True, slots=True)
class AdaptedChat:
    """Request of another protocol as a chat."""

    chat: ChatBody
    reply: ReplyKind
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of chats, or begins of their paths, each with its name in the protocol; errors name that. One that begins
    with a dot is within another."""
    too_long: str | None = None
    """Message for a prompt of `num_tokens`, more than the `limit`, as the protocol has it; None: OpenAI's."""
    ignored_tools: tuple[str, ...] = ()
    """Tools of the request that only the protocol's own server can run; the model does not see them."""
    droppable: tuple[tuple[int, ...], ...] = ()
    """Units of messages, by their indices, that may be dropped in this order if the prompt exceeds the context."""
    summary: int | None = None
    """Index of the message with the summary of a compaction, which is never dropped; None: there is none."""

    async def prepare(self, service: CompletionService, caller: Caller) -> PreparedCompletion:
        """Prepare the completion, as `CompletionService.chat` does; as few messages as must be are dropped.

        Raises:
            InvalidRequest: the request cannot be served; it names fields as the protocol does.
            UnknownModel, NoReplicaAvailable: as `CompletionService.chat`.
        """
        try:
            prepared = await self._prepared(service, caller)
        except ContextExceeded as error:
            raise self._told(error) from None
        return replace(prepared, not_enforced=tuple(map(self._renamed_pointer, prepared.not_enforced)))

    async def _prepared(self, service: CompletionService, caller: Caller) -> PreparedCompletion:
        """Prepare the completion; if the prompt exceeds the context, bisection finds the fewest units to drop.

        Raises:
            ContextExceeded: the prompt is too long with all units dropped; it names fields as chats do.
            InvalidRequest, UnknownModel, NoReplicaAvailable: as `prepare` does.
        """
        try:
            return await service.chat(self.chat, caller, self.reply)
        except ContextExceeded:
            if not self.droppable:
                raise
        except InvalidRequest as error:
            raise self._told(error) from None
        fewest, most = 1, len(self.droppable)
        prepared = await self._without(most)._prepared(service, caller)
        while fewest < most:
            middle = (fewest + most) // 2
            try:
                prepared, most = await self._without(middle)._prepared(service, caller), middle
            except ContextExceeded:
                fewest = middle + 1
        return prepared

    def _without(self, num_units: int) -> AdaptedChat:
        """Return the chat without its first droppable units."""
        dropped = {index for unit in self.droppable[:num_units] for index in unit}
        indices = [index for index in range(len(self.chat.messages)) if index not in dropped]
        names = {path: name for path, name in self.names.items() if not path.startswith("messages[")}
        for place, index in enumerate(indices):
            old, new = f"messages[{index}]", f"messages[{place}]"
            names |= {new + path[len(old) :]: name for path, name in self.names.items() if path.startswith(old)}
        messages = MessageList([self.chat.messages[index] for index in indices])
        return replace(self, chat=self.chat.model_copy(update={"messages": messages}), names=names, droppable=())

    def _renamed_pointer(self, pointer: str) -> str:
        """Return a JSON pointer into the chat as one into the protocol's request."""
        for path, name in self.names.items():
            begin = f"{_pointer_of(path)}/"
            if pointer.startswith(begin) or (path.startswith(".") and begin in pointer):
                return pointer.replace(begin, f"{_pointer_of(name)}/", 1)
        return pointer

    async def num_prompt_tokens(self, service: CompletionService, caller: Caller) -> int:
        """Return the number of tokens of the prompt, as `CompletionService.num_prompt_tokens` does.

        Raises:
            InvalidRequest, UnknownModel, NoReplicaAvailable: as `prepare` does.
        """
        try:
            return await service.num_prompt_tokens(self.chat, caller)
        except InvalidRequest as error:
            raise self._told(error) from None

    def _told(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the chat in the protocol's words."""
        if isinstance(error, ContextExceeded) and self.too_long is not None:
            message = self.too_long.format(num_tokens=error.num_prompt_tokens, limit=error.max_model_len - 1)
            return InvalidRequest(message, error.param, error.code)
        told = renamed(error, self.names)
        if isinstance(error, ContextExceeded) and told.param is not None:
            return ContextExceeded(told.message, told.param, error.num_prompt_tokens, error.max_model_len)
        return told


def chat_of(fields: dict[str, Any], names: Mapping[str, str]) -> ChatBody:
    """Return a chat's body.

    Raises:
        InvalidRequest: a field has a value that chats do not accept; it is named as in `names`.
    """
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise renamed(invalid_request(error.errors(include_url=False)), names) from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error about a field of a chat as one about the protocol's field.

    The longest begin of the field's path that has a name is replaced, then what begins with a dot.
    """
    if error.param is None:
        return error
    ends = [*(place.start() for place in _STEP.finditer(error.param)), len(error.param)]
    begin = next((error.param[:end] for end in reversed(ends) if error.param[:end] in names), "")
    param = names.get(begin, "") + error.param[len(begin) :]
    for inner, name in names.items():
        param = param.replace(inner, name) if inner.startswith(".") else param
    whole_path = rf"(?<![\w.]){re.escape(error.param)}(?![\w.\[])"
    return InvalidRequest(re.sub(whole_path, param, error.message), param, error.code)


def _pointer_of(path: str) -> str:
    """Return the path of a field as a JSON pointer."""
    return "/" + _STEP.sub("/", path.replace("]", "")).lstrip("/")
