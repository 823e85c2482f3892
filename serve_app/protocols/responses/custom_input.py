"""Custom tools as functions of one text: the schema of its grammar, and the reading of calls as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from lark.grammar import Symbol
from lark.lexer import Token
from lark.load_grammar import load_grammar
from lark.tree import Tree

from replicas.errors import InvalidRequest
from serve_app.openai.reply.format import JsonObject
from serve_app.protocols.responses.schema import CustomTool, InputGrammar

FIELD = "input"
"""Only argument of the function that stands for a custom tool."""
MAX_LARK_CHARS = 8_192
"""Longest Lark grammar, characters: its reading takes some 20 ms for each 1,000."""
MAX_PATTERN_CHARS = 65_536
"""Longest regular expression that a grammar may become, characters."""

_BEGIN = re.compile(rf'\s*\{{\s*"{FIELD}"\s*:\s*"')
_WHOLE = re.compile(
    r"""[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
)
"""Part of a JSON string that is whole by itself: half of a surrogate pair is not."""
_OTHER_IMPORT = re.compile(r"%import(?!\s+common\s*\.)")
_STRING = re.compile(r'"(.*)"(i?)', re.DOTALL)
_REGEXP = re.compile(r"/(.*)/([imslux]*)", re.DOTALL)


def input_schema(tool: CustomTool, param: str) -> JsonObject:
    """Return the JSON Schema of the arguments of the function that stands for a custom tool.

    Raises:
        InvalidRequest: the tool's grammar cannot be enforced; the error names `param`.
    """
    text: JsonObject = {"type": "string"}
    if isinstance(tool.format, InputGrammar):
        grammar = tool.format
        try:
            pattern = grammar.definition if grammar.syntax == "regex" else _pattern_of(grammar.definition)
        except Exception as error:  # Lark's loader may raise anything.
            reason = str(error).strip().partition("\n")[0]
            raise InvalidRequest(f"`{param}` cannot be enforced: {reason}", param) from None
        text |= {"description": f"Text of this {grammar.syntax} grammar:\n{grammar.definition}"}
        text |= {"pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {FIELD: text}, "required": [FIELD], "additionalProperties": False}


def input_arguments(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({FIELD: text}, ensure_ascii=False)


class InputReader:
    """Reader of a call's input out of the JSON of its arguments, which arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._begin: re.Match[str] | None = None
        self.has_ended = False
        """True if the input is whole."""

    def add(self, piece: str) -> str:
        """Add a piece of the arguments; return the input that it decides."""
        self._text += piece
        if self._begin is None:
            self._begin = _BEGIN.match(self._text)
            self._position = 0 if self._begin is None else self._begin.end()
        if self._begin is None or self.has_ended:
            return ""
        start = self._position
        while (part := _WHOLE.match(self._text, self._position)) is not None:
            self._position = part.end()
        self.has_ended = self._text.startswith('"', self._position)
        return str(json.loads(f'"{self._text[start : self._position]}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the input: all arguments, if they have another form than those of a custom tool."""
        return self._text if self._begin is None else ""


@lru_cache(maxsize=64)
def _pattern_of(definition: str) -> str:
    """Return the regular expression of a Lark grammar.

    Raises:
        LarkError, ValueError: it is no such grammar, or recursive, or too long, or imports files.
    """
    if len(definition) > MAX_LARK_CHARS:
        raise ValueError(f"it has {len(definition)} characters; at most {MAX_LARK_CHARS} are accepted")
    if _OTHER_IMPORT.search(definition):
        raise ValueError("it imports another grammar than `common`")
    grammar, _ = load_grammar(definition, "definition", [], False)  # type: ignore[no-untyped-call]
    rules = {str(name): (parameters, tree) for name, parameters, tree, _ in grammar.rule_defs}
    terminals = {str(name): tree for name, (tree, _) in grammar.term_defs}
    return _Pattern(rules, terminals, grammar.ignore).of_rule("start")


class _Pattern:
    """Regular expression under construction from the rules of a Lark grammar."""

    def __init__(
        self, rules: Mapping[str, tuple[Sequence[str], Any]], terminals: Mapping[str, Any], ignored: Sequence[str]
    ) -> None:
        self._rules = rules
        self._terminals = terminals
        self._open: list[str] = []
        """Rules within which the current one stands."""
        self._patterns: dict[str, str] = {}
        self._between = ""
        """Pattern of what may stand around each terminal."""
        self._between = f"(?:{'|'.join(map(self._of_terminal, ignored))})*" if ignored else ""

    def of_rule(self, name: str) -> str:
        """Return the pattern of a rule.

        Raises:
            ValueError: the rule refers to itself, is missing, or its pattern is too long.
        """
        if name not in self._rules:
            raise ValueError(f"it has no rule `{name}`")
        parameters, tree = self._rules[name]
        if parameters:
            raise ValueError(f"its rule `{name}` is a template")
        return self._of_definition(name, partial(self._of_tree, tree))

    def _of_definition(self, name: str, make: Callable[[], str]) -> str:
        if name in self._open:
            raise ValueError(f"its rule `{name}` refers to itself")
        if name not in self._patterns:
            self._open.append(name)
            self._patterns[name] = make()
            self._open.pop()
        return self._patterns[name]

    def _of_terminal(self, name: str) -> str:
        if name not in self._terminals:
            raise ValueError(f"it has no terminal `{name}`")
        return self._of_definition(name, partial(self._of_tree, self._terminals[name], is_within_terminal=True))

    def _of_tree(self, tree: Any, is_within_terminal: bool = False) -> str:
        of = partial(self._of_tree, is_within_terminal=is_within_terminal)
        match tree:
            case Tree(data="expansions", children=options):
                return f"(?:{_bounded('|'.join(map(of, options)))})"
            case Tree(data="expansion", children=parts):
                return _bounded("".join(map(of, parts)))
            case Tree(data="alias" | "value" | "literal", children=[inner, *_]):
                return of(inner)
            case Tree(data="maybe", children=[inner]):
                return f"(?:{of(inner)})?"
            case Tree(data="expr", children=[inner, Token(type="OP") as times]):
                return f"(?:{of(inner)}){times}"
            case Tree(data="expr", children=[inner, _, *bounds]):
                return f"(?:{of(inner)}){{{','.join(map(str, bounds))}}}"
            case Tree(data="range", children=[first, last]):
                return self._around(f"[{_literal(str(first))}-{_literal(str(last))}]", is_within_terminal)
            case Symbol(is_term=True, name=name):
                return self._around(self._of_terminal(name), is_within_terminal)
            case Symbol(name=name):
                return self.of_rule(name)
            case Token(type="STRING" | "REGEXP"):
                return self._around(_literal(str(tree)), is_within_terminal)
        raise ValueError(f"it has a part that no regular expression has: {getattr(tree, 'data', tree)}")

    def _around(self, pattern: str, is_within_terminal: bool) -> str:
        """Return a terminal's pattern with what may stand before and behind it."""
        return pattern if is_within_terminal else f"{self._between}{pattern}{self._between}"


def _bounded(pattern: str) -> str:
    """Return a pattern that is not too long."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"as a regular expression it has more than {MAX_PATTERN_CHARS} characters")
    return pattern


def _literal(token: str) -> str:
    """Return the pattern of a string or of a regular expression, as Lark writes them."""
    text = _STRING.fullmatch(token)
    if text is not None:
        pattern = re.escape(str(json.loads(f'"{text[1]}"', strict=False)))
        return f"(?i:{pattern})" if text[2] else pattern
    expression = _REGEXP.fullmatch(token)
    if expression is None:
        raise ValueError(f"it has a terminal that is neither a string nor a regular expression: {token}")
    pattern, flags = expression[1].replace(r"\/", "/"), expression[2]
    return f"(?{flags}:{pattern})" if flags else f"(?:{pattern})"
