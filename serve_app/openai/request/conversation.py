"""Schemas of a conversation: its messages, and the fields that decide how a chat template renders it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, overload

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from serve_app.errors import shown
from serve_app.openai.request.body import (
    CONFLICT,
    INVALID,
    MISSING,
    UNSUPPORTED,
    IgnoredValues,
    NonEmptyText,
    StrictBody,
    without_ignored,
)
from serve_app.openai.request.tools import FunctionTool, ToolCall, Tools

MESSAGE_IGNORED: IgnoredValues = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "images": ([],),
    "partial": (False,),
    "prefix": (False,),
}
"""Fields of messages in other APIs, such as those that the SDKs' clients send back with a reply as history."""
_BYTES_WITHOUT_TEXTS = 64
"""Size of a message without its texts, about."""


def _joined_text(content: object) -> object:
    """Return a message's text: a string, or a list's text parts joined by newlines, as in vLLM."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and part.keys() == {"type", "refusal"} and isinstance(part["refusal"], str):
            texts.append(part["refusal"])
            continue
        if kind != "text":
            raise PydanticCustomError(
                UNSUPPORTED, "has a part of type {kind}; only text parts are supported", {"kind": shown(kind)}
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError(INVALID, "has a text part without a string `text`")
        for name in part.keys() - {"type", "text"}:
            if part[name] is not None:
                message = "has a text part with the field {name}, which is not supported"
                raise PydanticCustomError(UNSUPPORTED, message, {"name": shown(name)})
        texts.append(part["text"])
    return "\n".join(texts)


def _served_role(role: object) -> object:
    if role == "function":
        raise PydanticCustomError(
            UNSUPPORTED, "is {role}; messages of this role are not supported", {"role": shown(role)}
        )
    return role


def _only_of_assistant(calls: list[ToolCall], info: ValidationInfo) -> list[ToolCall]:
    if calls and info.data.get("role", "assistant") != "assistant":
        raise PydanticCustomError(INVALID, "is only for messages of the role assistant")
    return calls


def _of_tool(call_id: str | None, info: ValidationInfo) -> str | None:
    is_result = info.data.get("role") == "tool"
    if is_result and call_id is None:
        raise PydanticCustomError(MISSING, "is missing")
    if not is_result and call_id is not None:
        raise PydanticCustomError(INVALID, "is only for messages of the role tool")
    return call_id


def _needed_content(content: str | None, info: ValidationInfo) -> str | None:
    if content is None and not info.data.get("tool_calls"):
        raise PydanticCustomError(MISSING, "is missing")
    return content


class RefusalPart(StrictBody):
    """Part of a message's content, a refusal of the model."""

    type: Literal["refusal"]
    refusal: str


class TextPart(StrictBody):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictBody):
    """One turn of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_served_role)]
    tool_calls: Annotated[list[ToolCall], AfterValidator(_only_of_assistant)] = Field(default_factory=list)
    """Calls of the model's turn."""
    tool_call_id: Annotated[NonEmptyText | None, AfterValidator(_of_tool)] = Field(None, validate_default=True)
    """Call whose result the message is."""
    content: Annotated[
        str | None,
        BeforeValidator(_joined_text, json_schema_input_type=str | list[TextPart | RefusalPart]),
        AfterValidator(_needed_content),
    ] = Field(None, validate_default=True)
    """Text of the message. Only the model's own turn with calls may have none."""
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning of the model's turn, for templates that show it."""
    reasoning: str | None = None
    """The same under vLLM's name."""
    parsed: Any = Field(None, exclude=True)
    """Form that an SDK has parsed the content to; accepted in history and not used."""
    provider_specific_fields: Any = Field(None, exclude=True)
    """Notes of litellm on a reply; accepted in history and not used."""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored_fields(cls, fields: object) -> object:
        return without_ignored(fields, MESSAGE_IGNORED) if isinstance(fields, dict) else fields

    @property
    def num_bytes(self) -> int:
        """Size of the message, about."""
        arguments = [call.function.arguments for call in self.tool_calls]
        texts = (self.content, self.reasoning_content, self.reasoning, *arguments)
        return _BYTES_WITHOUT_TEXTS + sum(len(text) for text in texts if text)

    def turn(self) -> dict[str, Any]:
        """Return the message as chat templates know it."""
        turn = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            del turn["tool_calls"]
        if self.reasoning is not None:
            turn.setdefault("reasoning_content", turn.pop("reasoning"))
        return turn


class MessageList(Sequence[ChatMessage]):
    """Messages of a conversation. Pickled, they stay bytes until one is read, so a process hands them on cheaply."""

    def __init__(self, messages: Sequence[ChatMessage], packed: bytes | None = None) -> None:
        """`packed` are the pickled messages, where `messages` has not been read from them yet."""
        self._messages = messages
        self._packed = packed

    @classmethod
    def unread(cls, packed: bytes) -> MessageList:
        """Return the messages in pickled bytes."""
        return cls((), packed)

    @property
    def num_bytes(self) -> int:
        """Size of the texts or of the pickled messages, about."""
        if self._packed is not None:
            return len(self._packed)
        return sum(message.num_bytes for message in self._messages)

    def __reduce__(self) -> tuple[Callable[[bytes], MessageList], tuple[bytes]]:
        """Return the function and the bytes from which another process makes the list."""
        packed = self._packed or pickle.dumps(self._messages, pickle.HIGHEST_PROTOCOL)
        return MessageList.unread, (packed,)

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[ChatMessage]:
        return iter(self._read())

    @overload
    def __getitem__(self, index: int) -> ChatMessage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ChatMessage]: ...
    def __getitem__(self, index: int | slice) -> ChatMessage | Sequence[ChatMessage]:
        return self._read()[index]

    def _read(self) -> Sequence[ChatMessage]:
        if self._packed is not None:
            self._messages, self._packed = pickle.loads(self._packed), None
        return self._messages

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema: that of a list of messages, which becomes this type."""
        messages = handler.generate_schema(Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)])
        return core_schema.no_info_after_validator_function(cls, messages)


NO_MESSAGES = MessageList(())


class Conversation(StrictBody):
    """Fields that decide how a conversation is rendered."""

    tools: Tools = Field(default_factory=list)
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """True if the prompt begins the model's turn. None: true, unless `continue_final_message` is."""
    continue_final_message: bool = False
    """True if the output continues the last message."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Effort of the reasoning, for chat templates that know it; `none` switches it off."""

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            message = "is true beside `continue_final_message`; send one of them"
            raise PydanticCustomError(CONFLICT, message, {"param": "add_generation_prompt"})
        return self

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """Tools that the model may call."""
        return self.tools

    @property
    def begins_turn(self) -> bool:
        """True if the prompt begins the model's turn."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given
