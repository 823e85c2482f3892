"""Conversion of a response's request into a chat: its items become messages, its tools functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel

from replicas.errors import InvalidRequest
from serve_app.errors import shortened
from serve_app.openai.reply.chat_format import ReplyKind
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.schema import GenerationOptions
from serve_app.protocols.adapted_chat import AdaptedChat, chat_of
from serve_app.protocols.responses.custom_input import input_arguments
from serve_app.protocols.responses.encrypted_content import ContentCipher
from serve_app.protocols.responses.items import (
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    ItemMessage,
    Reasoning,
)
from serve_app.protocols.responses.reply import ReplyOptions, ResponseFormat
from serve_app.protocols.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    REFUSED,
    REFUSED_WITHOUT_STORE,
    RESPONSES_IGNORED,
    FlatJsonSchemaFormat,
    ItemReference,
    ResponsesBody,
)
from serve_app.protocols.responses.toolset import Toolset, choice_of, function_name, toolset_of
from serve_app.protocols.responses.truncation import INSTRUCTIONS, droppable_units

REASONING, COMPACTION = "reasoning", "compaction"
"""Kinds of encrypted contents."""
SUMMARY_HEADING = "Summary of the conversation so far:"
"""First line of the message with a compaction's summary."""
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "truncation", "metadata", "user",
    "safety_identifier", "prompt_cache_key", "presence_penalty", "frequency_penalty", "top_logprobs",
)  # fmt: skip
"""Fields of the request that the response repeats as they are."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """Request for a response, with its chat unless that needs the stored part of the conversation."""

    fields: JsonObject
    body: ResponsesBody
    adapted: AdaptedChat | None
    """Chat of the request; None: `with_history` makes it."""

    @classmethod
    def of(cls, fields: JsonObject, default_model: str | None = None) -> ResponseRequest:
        """Return the request in a body's fields; `default_model` is for a request that names none.

        Raises:
            InvalidRequest: a field cannot be served; the error names it.
        """
        fields = ({} if default_model is None else {"model": default_model}) | fields
        body = _parsed(fields)
        _check_stored(body)
        has_history = body.previous_response_id is not None or body.conversation is not None
        needs_store = has_history or body.has_encrypted or bool(_referenced_ids(body))
        return cls(fields, body, None if needs_store else _adapted(body, Origin(body.store)))

    @property
    def conversation_id(self) -> str | None:
        """Conversation that the request continues; None: none."""
        given = self.body.conversation
        return given if given is None or isinstance(given, str) else given.id

    @property
    def referenced_ids(self) -> tuple[str, ...]:
        """Ids of the stored items to which the input refers."""
        return _referenced_ids(self.body)

    def with_items(self, items: Sequence[JsonObject]) -> ResponseRequest:
        """Return the request with stored items in the places of the references to them.

        Raises:
            InvalidRequest: the conversation cannot be served.
        """
        by_id = {item["id"]: item for item in items}
        own = [by_id[item["id"]] if item.get("type") == "item_reference" else item for item in self.fields["input"]]
        return ResponseRequest.of({**self.fields, "input": own})

    def items(self, history: Sequence[JsonObject]) -> list[JsonObject]:
        """Return the items of the conversation: those that are stored before the request's own, and these."""
        own = self.fields["input"]
        return [*history, *([{"role": "user", "content": own}] if isinstance(own, str) else own)]

    def with_history(
        self, history: Sequence[JsonObject], cipher: ContentCipher, compaction: str | None = None
    ) -> AdaptedChat:
        """Return the chat of the request with the items that are stored before its own.

        `compaction` is the encrypted summary of all of these, if the request makes one: its output begins with that.

        Raises:
            InvalidRequest: the conversation cannot be served.
        """
        origin = Origin(self.body.store, len(history), cipher, compaction)
        if not history and compaction is None:
            return _adapted(self.body, origin)
        items = self.items(history)
        if compaction is not None:
            items.append({"type": COMPACTION, "encrypted_content": compaction})
        return _adapted(_parsed({**self.fields, "input": items}), origin)


def adapted_response(fields: JsonObject, default_model: str | None = None) -> AdaptedChat:
    """Return the chat of the fields of a response's request where nothing is stored.

    Raises:
        InvalidRequest: a field cannot be served; the error names it.
    """
    _refuse(fields, REFUSED_WITHOUT_STORE)
    return _adapted(_parsed(({} if default_model is None else {"model": default_model}) | fields), Origin(False))


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a conversation and its encrypted contents."""

    is_stored: bool
    """True if the response is stored."""
    num_before: int = 0
    """First items of the input that are from the store."""
    cipher: ContentCipher | None = None
    """Cipher of the encrypted contents; None: there may be none."""
    compaction: str | None = None
    """Encrypted summary that the request has made of its input; None: it has made none."""


def _parsed(fields: JsonObject) -> ResponsesBody:
    _refuse(fields, REFUSED)
    return parse_body(ResponsesBody, fields, RESPONSES_IGNORED)


def _referenced_ids(body: ResponsesBody) -> tuple[str, ...]:
    items = () if isinstance(body.input, str) else body.input
    return tuple(item.id for item in items if isinstance(item, ItemReference))


def _refuse(fields: JsonObject, refused: Mapping[str, str]) -> None:
    for name, advice in refused.items():
        if fields.get(name):
            raise InvalidRequest(f"`{name}` is not supported: {advice}", name, "unsupported_parameter")


def _check_stored(body: ResponsesBody) -> None:
    """Refuse a request whose fields about what is stored exclude each other."""
    if body.previous_response_id is not None and body.conversation is not None:
        message = "`previous_response_id` and `conversation` exclude each other"
        raise InvalidRequest(message, "previous_response_id")
    if body.background and not body.store:
        raise InvalidRequest("`background` is true and `store` is false; it must be true", "background")
    if body.background and (body.top_logprobs or LOGPROBS in body.include):
        message = "log probabilities are not stored; `background` is not supported with them"
        raise InvalidRequest(message, "background", "unsupported_parameter")


def _adapted(body: ResponsesBody, origin: Origin) -> AdaptedChat:
    """Return the chat of a request.

    Raises:
        InvalidRequest: a field cannot be served; the error names it.
    """
    toolset = toolset_of(body.tools)
    choice = choice_of(body.tool_choice, toolset.names)
    offered = toolset if choice.names is None else toolset.limited_to(choice.names)
    messages = messages_of(body, origin)
    names = {**_NAMES, **messages.names, **_tool_names(offered)}
    if choice.choice == "required" and not offered.functions:
        message = "`tool_choice` is required, and none of `tools` can be run here"
        raise InvalidRequest(message, "tool_choice", "unsupported_parameter")
    chat = {
        **_given(body, set(GenerationOptions.model_fields)),
        "messages": messages.turns,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "tools": offered.functions,
        "tool_choice": choice.choice if offered.functions else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": "xhigh" if body.reasoning.effort == "max" else body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.top_logprobs or LOGPROBS in body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    options = ReplyOptions(
        echo=_echo(body, origin.is_stored),
        names=toolset.names,
        has_summary=body.reasoning.summary is not None,
        encrypt=_encryption(origin.cipher) if ENCRYPTED in body.include else None,
        compaction=origin.compaction,
    )
    reply = ReplyKind("resp_", partial(ResponseFormat, options))
    droppable = droppable_units(messages.turns, messages.summary) if body.truncation == "auto" else ()
    return AdaptedChat(
        chat_of(chat, names),
        reply,
        names,
        ignored_tools=tuple(toolset.ignored),
        droppable=droppable,
        summary=messages.summary,
    )


def _encryption(cipher: ContentCipher | None) -> Callable[[str], str]:
    """Return the function that encrypts a reasoning.

    Raises:
        InvalidRequest: nothing can be encrypted here.
    """
    if cipher is None:
        message = f"`include` has {ENCRYPTED}, which needs the store of responses; there is none"
        raise InvalidRequest(message, "include", "unsupported_parameter")
    return partial(cipher.encrypt, REASONING)


@dataclass(slots=True)
class Messages:
    """Messages of a chat, made item by item.

    An answer's items, reasoning, then text, then calls, become one message. An item that does not follow in this order
    begins another message.
    """

    turns: list[JsonObject] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Fields of the messages, each with its name in the request."""
    call_ids: set[str] = field(default_factory=set)
    cipher: ContentCipher | None = None
    """Cipher of the encrypted contents; None: they are refused."""
    summary: int | None = None
    """Index of the message with the summary of a compaction; None: there is none."""
    _is_open: bool = False
    """True if the last message is the model's turn, to which items may be added."""

    def add(self, item: Item | ItemReference, place: str) -> None:
        """Add an item that stands at a place of the request.

        Raises:
            InvalidRequest: it is the output of a call that is not there, has a content that cannot be decrypted, or
                refers to an item where none is stored.
        """
        match item:
            case ItemReference():
                message = f"`{place}` refers to an item, and nothing is stored here; send the item itself"
                raise InvalidRequest(message, place, "unsupported_parameter")
            case ItemMessage(role="assistant", content=text):
                turn = self._answer(place, before=("tool_calls", "content"))
                turn["content"] = text
            case ItemMessage(role=role, content=text):
                self._begin({"role": role, "content": text}, place)
            case Reasoning():
                text = self._reasoning_text(item, place)
                if text:
                    self._answer(place, before=("tool_calls", "content", "reasoning_content"))["reasoning_content"] = (
                        text
                    )
            case FunctionCall(arguments=arguments):
                self._add_call(item, arguments, place)
            case CustomToolCall(input=text):
                self._add_call(item, input_arguments(text), place)
            case FunctionCallOutput(call_id=None, name=str(name), namespace=namespace, output=text):
                self._begin({"role": "user", "content": f"{function_name(name, namespace)}: {text}"}, place)
            case FunctionCallOutput(call_id=str(call_id)) | CustomToolCallOutput(call_id=call_id):
                if call_id not in self.call_ids:
                    param = f"{place}.call_id"
                    raise InvalidRequest(f"`{param}` is {shortened(call_id)}; no call before it has this id", param)
                self._begin({"role": "tool", "tool_call_id": call_id, "content": item.output}, place)
            case Compaction(encrypted_content=content):
                self._compact(self._decrypted(COMPACTION, content, place), place)

    def _reasoning_text(self, item: Reasoning, place: str) -> str:
        """Return the text of a reasoning: its content, else its summary, else what this server encrypted."""
        content = item.encrypted_content
        decrypted = self._decrypted(REASONING, content, place) if content else ""
        texts = [part.text for part in item.content] or [part.text for part in item.summary]
        return "\n".join(texts) or decrypted

    def _decrypted(self, kind: str, content: str, place: str) -> str:
        if self.cipher is None:
            message = f"`{place}` has an `encrypted_content`, which needs the store of responses; there is none"
            raise InvalidRequest(message, place, "unsupported_parameter")
        try:
            return self.cipher.decrypt(kind, content)
        except ValueError:
            message = (
                f"the `encrypted_content` of `{place}` was not made by this server for this tenant, or was altered"
            )
            raise InvalidRequest(message, place, "invalid_encrypted_content") from None

    def _compact(self, summary: str, place: str) -> None:
        """Put a summary in the place of all messages but the instructions and the last one of the user."""
        instructions = [index for index, turn in enumerate(self.turns) if turn["role"] in INSTRUCTIONS]
        users = [index for index, turn in enumerate(self.turns) if turn["role"] == "user" and index != self.summary]
        kept = [(self.turns[index], self.names[f"messages[{index}]"]) for index in (*instructions, *users[-1:])]
        self.summary = len(instructions)
        kept.insert(self.summary, ({"role": "user", "content": f"{SUMMARY_HEADING}\n{summary}"}, place))
        self.turns = [turn for turn, _ in kept]
        self.names = {f"messages[{index}]": name for index, (_, name) in enumerate(kept)}
        self.call_ids.clear()
        self._is_open = False

    def finish(self) -> None:
        """End the messages: a turn of reasoning alone has an empty text."""
        for turn in self.turns:
            if turn["role"] == "assistant" and "tool_calls" not in turn:
                turn.setdefault("content", "")

    def _begin(self, turn: JsonObject, place: str, is_open: bool = False) -> JsonObject:
        self.names[f"messages[{len(self.turns)}]"] = place
        self.turns.append(turn)
        self._is_open = is_open
        return turn

    def _answer(self, place: str, before: Sequence[str]) -> JsonObject:
        """Return the model's turn that is open and has none of the fields `before`, or a new one."""
        if self._is_open and not any(name in self.turns[-1] for name in before):
            return self.turns[-1]
        return self._begin({"role": "assistant"}, place, is_open=True)

    def _add_call(self, item: FunctionCall | CustomToolCall, arguments: str, place: str) -> None:
        calls = self._answer(place, before=()).setdefault("tool_calls", [])
        number, index = len(self.turns) - 1, len(calls)
        self.names[f"messages[{number}].tool_calls[{index}].function"] = place
        self.call_ids.add(item.call_id)
        function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})


def messages_of(body: ResponsesBody, origin: Origin) -> Messages:
    """Return the messages of a request: its instructions, then its input.

    Raises:
        InvalidRequest: an output's call is not there, or an encrypted content is another's.
    """
    messages = Messages(cipher=origin.cipher)
    if body.instructions:
        messages.add(ItemMessage(role="system", content=body.instructions), "instructions")
    if isinstance(body.input, str):
        messages.add(ItemMessage(role="user", content=body.input), "input")
    else:
        for index, item in enumerate(body.input, -origin.num_before):
            messages.add(item, f"input[{index}]" if index >= 0 else "previous_response_id")
    messages.finish()
    return messages


def _tool_names(toolset: Toolset) -> dict[str, str]:
    names = {}
    for index, (tool, place) in enumerate(zip(toolset.functions, toolset.places, strict=True)):
        names[f"tools[{index}].function"] = place
        if toolset.names[tool["function"]["name"]].is_custom:
            names[f"tools[{index}].function.parameters"] = f"{place}.format.definition"
    return names


def _response_format(body: ResponsesBody) -> JsonObject | None:
    match body.text.format:
        case FlatJsonSchemaFormat() as form:
            return {"type": "json_schema", "json_schema": _given(form, {"name", "description", "schema_", "strict"})}
        case form:
            return form.model_dump()


def _given(body: BaseModel, names: set[str]) -> JsonObject:
    """Return the fields of these names that a body has."""
    return body.model_dump(include=names & body.model_fields_set, by_alias=True)


def _echo(body: ResponsesBody, is_stored: bool) -> JsonObject:
    """Return the fields of the request that the response repeats."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _ECHOED}
    choice, given = body.tool_choice, body.conversation
    conversation = given if given is None or isinstance(given, str) else given.id
    return {
        **values,
        **({} if conversation is None else {"conversation": {"id": conversation}}),
        "metadata": body.metadata or {},
        "tools": [tool.model_dump() for tool in body.tools],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "text": {"format": body.text.format.model_dump(by_alias=True)},
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "previous_response_id": body.previous_response_id,
        "background": body.background,
        "store": is_stored,
    }
