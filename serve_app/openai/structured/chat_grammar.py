"""Grammar of a chat's output: its calls, its reasoning and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic_core import to_json

from replicas.errors import InvalidRequest
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.request.tools import FunctionTool, NamedToolChoice
from serve_app.openai.structured.json_schema import enforceable_schema, refuse_unenforced
from serve_app.openai.structured.output_grammar import OutputGrammar, output_grammar
from serve_app.openai.tools.families import ChatFamily
from serve_app.openai.tools.grammar import CallRule, answer_grammar, call_grammar, thinking_of
from serve_app.openai.tools.shapes.calls import Tool
from serve_app.openai.tools.shapes.shape import Marker


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """Form in which the served model writes calls and reasoning."""

    family: ChatFamily
    marker: Marker
    """Function that writes a family's markers for the model's tokenizer."""


def chat_grammar(body: ChatBody, dialect: ChatDialect, prompt: str) -> OutputGrammar | None:
    """Return the grammar of a chat's output behind its rendered prompt; None: any text.

    1. A required or named call: calls and nothing else.
    2. Tools: free text until a call begins, which is then bound. With `response_format`: calls, or an answer of it.
    3. `response_format` or `structured_outputs` alone: an answer of it.
    Reasoning before all of these is free.

    Raises:
        InvalidRequest: there is no such grammar; the error names the field.
    """
    answer, family, thinking = output_grammar(body), dialect.family, thinking_of(dialect.family, prompt)
    offered = body.offered_tools
    if not offered:
        if answer is None:
            return None
        return replace(answer, grammar=answer_grammar(family, answer.grammar, dialect.marker, thinking))
    tools, not_enforced = _bound_tools(body, family)
    is_required = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
    is_parallel = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedToolChoice)
    rule = CallRule(is_required, is_parallel, None if answer is None else answer.grammar)
    if answer is not None and not is_required:
        not_enforced += answer.not_enforced
    try:
        return OutputGrammar(call_grammar(family, tools, rule, dialect.marker, thinking), "tools", not_enforced)
    except ValueError as error:
        if is_required or answer is not None or any(tool.function.strict for tool in offered):
            raise InvalidRequest(f"`tools` cannot be enforced for this model: {error}", "tools") from None
        return None


def grammar_key(body: ChatBody, dialect: ChatDialect, prompt: str) -> bytes:
    """Return what the grammar of a chat's output is made of, but for the model; its size is that of the tools."""
    parts = (body.offered_tools, body.tool_choice, body.response_format, body.structured_outputs)
    return to_json([parts, body.parallel_tool_calls, thinking_of(dialect.family, prompt).name])


def callable_tools(body: ChatBody) -> list[Tool]:
    """Return the functions that the model may call, with the schemas that the client gave."""
    return [_tool(tool) for tool in body.offered_tools]


def _tool(tool: FunctionTool) -> Tool:
    return Tool(tool.function.name, tool.function.parameters, tool.function.strict)


def _bound_tools(body: ChatBody, family: ChatFamily) -> tuple[list[Tool], tuple[str, ...]]:
    """Return the functions that a grammar binds, and JSON pointers to what it does not enforce."""
    tools: list[Tool] = []
    not_enforced: list[str] = []
    chosen = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
    for index, offered in enumerate(body.offered_tools):
        tool, place = _tool(offered), f"/tools/{index}/function/parameters"
        if chosen not in (None, tool.name):
            continue
        if tool.parameters is not None:
            param = f"tools[{index}].function.parameters"
            enforceable = enforceable_schema(tool.parameters, param, is_strict=tool.strict)
            of_family = family.calls.unenforced(replace(tool, parameters=enforceable.reduced))
            tool = replace(tool, parameters=enforceable.schema)
            if tool.strict:
                refuse_unenforced(of_family, param)
            not_enforced += [f"{place}{pointer}" for pointer in (*enforceable.not_enforced, *of_family)]
        tools.append(tool)
    return tools, tuple(not_enforced)
