"""Bodies of Anthropic's Messages API as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from replicas.errors import InvalidRequest
from serve_app.errors import shortened
from serve_app.openai.reply.chat_format import ReplyKind
from serve_app.openai.request.parsing import BodyT, parse_body
from serve_app.openai.request.schema import ChatBody
from serve_app.protocols.adapted_chat import AdaptedChat, chat_of
from serve_app.protocols.messages.client_tools import client_tool
from serve_app.protocols.messages.reply import MessageFormat
from serve_app.protocols.messages.schema import (
    AnyBlock,
    AnyTool,
    Choice,
    DescribedTool,
    InputMessage,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Fields = dict[str, Any]

MESSAGE = ReplyKind("msg_", MessageFormat, lowers_max_tokens=True)
"""One answer in blocks."""

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
    ".json_schema.schema": ".schema",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
}
_BILLING_HEADER = "x-anthropic-billing-header:"
"""Begin of a block that Claude Code puts before the instructions; it differs from one conversation to the next."""
_ERROR = "Error: "
"""Begin of the text of a result that is an error."""
_TOO_LONG = "prompt is too long: {num_tokens} tokens > {limit} maximum"
"""Anthropic's words, on which Claude Code summarizes the conversation."""
_NO_THREADS = "thread_unsupported_request"
"""Code on which Anthropic's clients send a conversation without a thread."""
_MAX_IDS = 10
"""Most ids that one error names."""


def adapted_message(fields: Fields) -> AdaptedChat:
    """Return the chat for a body of POST /v1/messages.

    Raises:
        InvalidRequest: a field is unknown, not supported, missing or of a wrong type or value.
    """
    body = _parsed(MessagesBody, fields)
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "user": body.metadata.user_id}
    answer = {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences}
    chat = chat_of(_prompt_fields(body) | answer | given, _NAMES)
    return _adapted(chat, body)


def counted_message(fields: Fields) -> AdaptedChat:
    """Return the chat for a body of POST /v1/messages/count_tokens; it has the same prompt as that of the message.

    Raises:
        InvalidRequest: as `adapted_message` does.
    """
    body = _parsed(PromptBody, fields)
    return _adapted(chat_of(_prompt_fields(body), _NAMES), body)


def _adapted(chat: ChatBody, body: PromptBody) -> AdaptedChat:
    return AdaptedChat(chat, MESSAGE, _NAMES, _TOO_LONG, tuple(tool.type for tool in body.tools if _is_ignored(tool)))


def _parsed(schema: type[BodyT], fields: Fields) -> BodyT:
    if fields.get("thread") is not None:
        message = "`thread` is not supported: no conversation is stored; send all its messages"
        raise InvalidRequest(message, "thread", _NO_THREADS)
    return parse_body(schema, fields, {})


def _prompt_fields(body: PromptBody) -> Fields:
    """Return the fields of the chat that decide its prompt and its grammar."""
    _check_results(body.messages)
    system = [block for index, block in enumerate(body.system) if index or not block.text.startswith(_BILLING_HEADER)]
    turns = [{"role": "system", "content": _joined(system)}] if system else []
    for role, messages in groupby(body.messages, lambda message: message.role):
        turns += _turns(role, [block for message in messages for block in message.content])
    fields: Fields = {
        "model": body.model,
        "messages": turns,
        "tools": [_function(tool) for tool in body.tools if not _is_ignored(tool)],
        "continue_final_message": body.messages[-1].role == "assistant",
        **_reasoning(body),
        **_choice(body.tool_choice, body.tools),
    }
    if body.output_config.format is not None:
        form = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


def _turns(role: str, blocks: Sequence[AnyBlock]) -> Iterator[Fields]:
    """Yield the chat's messages for successive messages of one role: results come before the text beside them."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = _joined(block.content)
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _ERROR + text if block.is_error else text,
            }
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if role == "assistant":
        reasoning = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": _joined(texts), "tool_calls": calls} | reasoning
    elif texts or not blocks:
        yield {"role": role, "content": _joined(texts)}


def _joined(blocks: Sequence[TextBlock]) -> str:
    """Return the text of blocks, a line or more for each, as in chats: words of two blocks must not become one."""
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> Fields:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _check_results(messages: Sequence[InputMessage]) -> None:
    """Refuse results of calls that no earlier turn has, and a conversation that ends with a call.

    Raises:
        InvalidRequest: naming the calls.
    """
    known: set[str] = set()
    unknown: dict[str, str] = {}
    for place, message in enumerate(messages):
        for index, block in enumerate(message.content):
            match block:
                case ToolUseBlock():
                    known.add(block.id)
                case ToolResultBlock() if block.tool_use_id not in known:
                    unknown.setdefault(block.tool_use_id, f"messages[{place}].content[{index}].tool_use_id")
    if unknown:
        param = next(iter(unknown.values()))
        raise InvalidRequest(f"`{param}`: no earlier turn has a `tool_use` with the id {_listed([*unknown])}", param)
    open_ids = [block.id for block in messages[-1].content if isinstance(block, ToolUseBlock)]
    if open_ids:
        param = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(f"`{param}` is the last turn, and has no `tool_result` for {_listed(open_ids)}", param)


def _listed(ids: Sequence[str]) -> str:
    listed = ", ".join(f"`{shortened(call_id)}`" for call_id in ids[:_MAX_IDS])
    return listed if len(ids) <= _MAX_IDS else f"{listed} and {len(ids) - _MAX_IDS} more"


def _is_ignored(tool: AnyTool) -> bool:
    return not isinstance(tool, DescribedTool) and client_tool(tool.type) is None


def _function(tool: AnyTool) -> Fields:
    """Return a tool that the client runs as a chat's function."""
    if isinstance(tool, DescribedTool):
        function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
        return {"type": "function", "function": function | {"description": tool.description}}
    known = client_tool(tool.type)
    assert known is not None
    function = {"name": tool.name or known.name, "parameters": known.input_schema, "description": known.description}
    return {"type": "function", "function": function}


def _choice(choice: Choice | None, tools: Sequence[AnyTool]) -> Fields:
    """Return the fields of a chat for a choice of tools.

    Raises:
        InvalidRequest: the choice names no tool, or one that this server cannot run.
    """
    if choice is None:
        return {}
    fields: Fields = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    if choice.name is None:
        raise InvalidRequest("`tool_choice.name` is missing", "tool_choice.name", "missing_required_parameter")
    for tool in tools:
        if tool.name == choice.name and _is_ignored(tool):
            message = f"`tool_choice.name` is `{shortened(choice.name)}`, a tool of type `{shortened(tool.type)}`"
            raise InvalidRequest(f"{message}, which this server cannot run", "tool_choice", "unsupported_parameter")
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


def _reasoning(body: PromptBody) -> Fields:
    """Return the fields of a chat for the reasoning: `none` and hidden, unless the request asks for it."""
    if body.thinking is None or body.thinking.type == "disabled":
        return {"reasoning_effort": "none", "include_reasoning": False}
    effort = body.output_config.effort or "high"
    return {"reasoning_effort": "xhigh" if effort == "max" else effort}
