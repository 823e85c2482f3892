"""Schemas of tools, and of the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from serve_app.openai.request.body import INVALID, NonEmptyText, StrictBody

MAX_TOOLS = 128
MAX_NAME_CHARS = 128
"""Most characters of a function's name, as in Anthropic's API; OpenAI's has 64."""

_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


def _function_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not _NAME_CHARS.issuperset(name):
        raise PydanticCustomError(INVALID, "must be 1 to 128 letters, digits, dots, dashes and underscores")
    return name


FunctionName = Annotated[NonEmptyText, AfterValidator(_function_name)]


class FunctionObject(StrictBody):
    """Function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; without one they are any object."""
    strict: bool = False
    """True if a keyword of `parameters` that cannot be enforced is an error. Otherwise the answer's header names it."""


class FunctionTool(StrictBody):
    """Tool of the request."""

    type: Literal["function"]
    function: FunctionObject


class NamedFunction(StrictBody):
    """Name of a function."""

    name: FunctionName


class NamedToolChoice(StrictBody):
    """Choice of one function, which the model must call."""

    type: Literal["function"]
    function: NamedFunction


def _choice_kind(value: object) -> str:
    return "<mode>" if isinstance(value, str) else "<function>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedToolChoice, Tag("<function>")],
    Discriminator(_choice_kind),
]


class CalledFunction(StrictBody):
    """Function of a call, with the text of its arguments."""

    name: NonEmptyText
    arguments: str = "{}"
    """Text of a JSON object."""
    parsed_arguments: Any = Field(None, exclude=True)
    """Form that an SDK has parsed the text to; accepted in history and not used."""


class ToolCall(StrictBody):
    """Call in an earlier turn of the model."""

    id: NonEmptyText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Place of the call; accepted since streamed deltas have it."""


def unique_tools(tools: list[FunctionTool]) -> list[FunctionTool]:
    """Return tools, all of whose names differ."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise PydanticCustomError(INVALID, "has two functions named {name}", {"name": name})
    return tools


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), AfterValidator(unique_tools)]
