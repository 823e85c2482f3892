"""Arguments that are not written as JSON, and their conversion to it."""

from __future__ import annotations

import ast
import json
from typing import Any

from serve_app.openai.tools.shapes.calls import JsonObject
from serve_app.openai.tools.shapes.json_text import MAX_DEPTH, parse_json

_TYPES = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
_NAMES = {"true": True, "false": False, "null": None}


def json_of(arguments: JsonObject) -> str:
    """Return arguments as JSON.

    Raises:
        ValueError: a number is not finite, or a text is not Unicode.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def typed_value(text: str, schema: object) -> Any:
    """Return the value that a text stands for, as its schema says.

    The text is itself the value if the schema wants a string. Otherwise it is JSON, or a Python literal. Text that is
    neither stays a string.
    """
    types = admitted_types(schema)
    if types == {"string"}:
        return text
    value = literal(text)
    if types and "string" not in types:
        return value
    is_other = not isinstance(value, str) and (not types or types & _TYPES[type(value)])
    return value if is_other else text


def admitted_types(schema: object) -> set[str]:
    """Return the JSON types that a schema admits; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    if declared is not None:
        return set(declared) if isinstance(declared, list) else {str(declared)}
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return set().union(*(_TYPES[type(value)] for value in values))
    choices = [admitted_types(choice) for key in ("anyOf", "oneOf") for choice in schema.get(key, [])]
    return set().union(*choices) if all(choices) else set()


def is_text(schema: object) -> bool:
    """Return True if the value may be a string, which XML-like calls write as it is."""
    types = admitted_types(schema)
    return not types or "string" in types


def python_calls(text: str) -> list[tuple[str, JsonObject]]:
    """Return the names and keyword arguments of a Python list of calls.

    Raises:
        ValueError: the text is something else.
    """
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(parsed, ast.List) or not parsed.elts:
            raise ValueError("the text is not a list of calls")
        return [_call_of(node) for node in parsed.elts]
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("the text is not Python") from None


def _call_of(node: ast.expr) -> tuple[str, JsonObject]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("an element is not a call with keyword arguments")
    arguments = {str(keyword.arg): _value_of(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(arguments) != len(node.keywords):
        raise ValueError("an argument has no name, or two have one")
    return _name_of(node.func), arguments


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("a call has no name")
    return node.id


def _value_of(node: ast.expr, depth: int = 0) -> Any:
    """Return the value of a Python literal, in which JSON's names of constants may stand."""
    if depth > MAX_DEPTH:
        raise ValueError("an argument is nested too deeply")
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(element, depth + 1) for element in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {_key_of(key): _value_of(value, depth + 1) for key, value in pairs}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value_of(node.operand, depth + 1)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _joined(node.value)
    if isinstance(node, ast.Constant) and type(node.value) in _TYPES:
        return node.value
    raise ValueError("an argument is not a literal")


def _key_of(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key is not a string")
    return _joined(node.value)


def _joined(text: str) -> str:
    """Return the text with surrogate pairs as one character each; JSON may spell it so, and Python keeps them apart."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def literal(text: str) -> Any:
    """Return the value of JSON or of a Python literal; of other text, the text."""
    try:
        return parse_json(text)
    except ValueError:
        pass
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
