"""Tools of a request as functions of a chat, and the names by which the client knows them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replicas.errors import InvalidRequest
from serve_app.errors import shortened
from serve_app.openai.reply.format import JsonObject
from serve_app.protocols.responses.custom_input import input_schema
from serve_app.protocols.responses.schema import (
    AllowedTools,
    CustomTool,
    FlatFunction,
    ForeignTool,
    InputGrammar,
    NamedTool,
    NamespaceTool,
    Tool,
    ToolChoice,
)

MAX_NAME_CHARS = 64
"""Most characters of a function's name in OpenAI's API."""
_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True)
class ToolName:
    """Name of a tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoiceOfChat:
    """Choice of tools as a chat has it."""

    choice: object
    names: frozenset[str] | None = None
    """Functions that the model may call; None: all."""


@dataclass(slots=True)
class Toolset:
    """Functions that stand for the tools of a request."""

    functions: list[JsonObject] = field(default_factory=list)
    """Tools of the chat."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """Tools by the names of their functions."""
    places: list[str] = field(default_factory=list)
    """Places of the functions in the request, in their order."""
    ignored: list[str] = field(default_factory=list)
    """Types of the tools that this server cannot run."""

    def add(self, tool: FlatFunction | CustomTool, place: str, namespace: NamespaceTool | None = None) -> None:
        """Add a tool that stands at a place of the request.

        Raises:
            InvalidRequest: another tool has its name, or its grammar cannot be enforced.
        """
        space = None if namespace is None else namespace.name
        name = function_name(tool.name, space)
        if name in self.names:
            raise InvalidRequest(f"`tools` has two tools named {shortened(tool.name)}", f"{place}.name")
        texts = [tool.description]
        if namespace is not None and tool is namespace.tools[0]:
            texts.insert(0, namespace.description)
        function: JsonObject = {"name": name, "description": "\n\n".join(filter(None, texts)) or None}
        if isinstance(tool, FlatFunction):
            function |= {"parameters": tool.parameters, "strict": tool.strict}
        else:
            has_grammar = isinstance(tool.format, InputGrammar)
            function |= {"parameters": input_schema(tool, f"{place}.format.definition"), "strict": has_grammar}
        self.functions.append({"type": "function", "function": function})
        self.names[name] = ToolName(tool.name, space, isinstance(tool, CustomTool))
        self.places.append(place)

    def limited_to(self, names: frozenset[str]) -> Toolset:
        """Return the toolset without the functions of other names; their names stay known."""
        kept = [index for index, tool in enumerate(self.functions) if tool["function"]["name"] in names]
        functions = [self.functions[index] for index in kept]
        return Toolset(functions, self.names, [self.places[index] for index in kept], self.ignored)


def toolset_of(tools: Sequence[Tool]) -> Toolset:
    """Return the functions for tools; a namespace's description stands before that of its first function.

    Raises:
        InvalidRequest: two tools have one name, or a grammar cannot be enforced.
    """
    toolset = Toolset()
    for index, tool in enumerate(tools):
        match tool:
            case ForeignTool(type=kind):
                toolset.ignored.append(kind)
            case NamespaceTool(tools=inner):
                for number, member in enumerate(inner):
                    toolset.add(member, f"tools[{index}].tools[{number}]", tool)
            case FlatFunction() | CustomTool():
                toolset.add(tool, f"tools[{index}]")
    return toolset


def function_name(name: str, namespace: str | None = None) -> str:
    """Return the name of the function that stands for a tool; a name that is too long ends in its digest."""
    whole = name if namespace is None else f"{namespace}.{name}"
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{whole[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def choice_of(choice: ToolChoice, names: Mapping[str, ToolName]) -> ToolChoiceOfChat:
    """Return a choice of tools as a chat has it; `names` are the tools by the names of their functions.

    Raises:
        InvalidRequest: it forces a tool that this server cannot run, or that is none of the request's.
    """
    match choice:
        case ForeignTool(type=kind):
            message = f"`tool_choice` is {shortened(kind)}, a tool that this server cannot run"
            raise InvalidRequest(message, "tool_choice", "unsupported_parameter")
        case NamedTool():
            name = _known(choice, names, "tool_choice.name")
            return ToolChoiceOfChat({"type": "function", "function": {"name": name}})
        case AllowedTools(mode=mode, tools=tools):
            allowed = frozenset(_allowed(tools, names))
            if not allowed and mode == "required":
                message = "`tool_choice.tools` has only tools that this server cannot run"
                raise InvalidRequest(message, "tool_choice.tools", "unsupported_parameter")
            return ToolChoiceOfChat(mode if allowed else "none", allowed)
    return ToolChoiceOfChat(choice)


def _allowed(tools: Sequence[NamedTool | ForeignTool], names: Mapping[str, ToolName]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        if isinstance(tool, NamedTool):
            yield _known(tool, names, f"tool_choice.tools[{index}].name")


def _known(tool: NamedTool, names: Mapping[str, ToolName], param: str) -> str:
    """Return the name of a tool's function; a name without a namespace may be that of a tool within one."""
    name = function_name(tool.name, tool.namespace)
    if name in names:
        return name
    inner = [function for function, known in names.items() if known.name == tool.name and tool.namespace is None]
    if len(inner) != 1:
        raise InvalidRequest(f"`{param}` is {shortened(tool.name)}, which is none of `tools`", param)
    return inner[0]
