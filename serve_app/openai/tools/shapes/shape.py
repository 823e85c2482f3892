"""Shape of calls, as the parser, the grammar and the prompt need it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from serve_app.openai.tools.shapes.calls import Call, JsonObject, Sink, Tool
from serve_app.openai.tools.shapes.reader import Reader, Wait

Marker = Callable[[str], str]
"""Function that writes text as a Lark expression, in which special tokens are what the tokenizer makes of them."""

_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


class CallShape(Protocol):
    """Form of calls in a model's text. A block of calls opens with a marker and holds one call or several."""

    @property
    def begin(self) -> str:
        """Marker that opens a block; empty if a block has none and stands at the begin of the answer."""

    @property
    def other_begins(self) -> Sequence[str]:
        """Further markers that a parser takes for `begin`."""

    @property
    def openings(self) -> Sequence[str]:
        """Texts with which a block without a marker may begin, at the begin of an answer."""

    @property
    def block_separator(self) -> str | None:
        """Text between two blocks of an answer; None if an answer has one block."""

    @property
    def holds_several(self) -> bool:
        """True if a block may hold several calls."""

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a block behind its marker, and settle each call that is reported.

        Returns:
            False if the text from `reader.held` on is no call.
        """

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls, as the family's templates write it."""

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker, of one call or of several."""

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return JSON pointers to the schema's keywords that `bind` does not enforce."""


def joined_blocks(
    texts: Sequence[str], begin: str, end: str, separator: str | None, block_separator: str | None
) -> str:
    """Return the text of calls: all in one block if they have a separator, else each in a block of its own."""
    if separator is None:
        return (block_separator or "").join(f"{begin}{text}{end}" for text in texts)
    return f"{begin}{separator.join(texts)}{end}"


class Lark:
    """Lark grammar under construction."""

    def __init__(self, marker: Marker) -> None:
        self.text = marker
        self._rules: list[str] = []

    def rule(self, expression: str, options: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def recursive(self, expression_of: Callable[[str], str]) -> str:
        """Add a rule whose expression may hold the rule itself; return its name."""
        index = len(self._rules)
        name = f"rule_{index}"
        self._rules.append("")
        self._rules[index] = f"{name}: {expression_of(name)}"
        return name

    def text_until(self, literal: str, text: str = "TEXT") -> str:
        """Return the expression of any text up to the first occurrence of the literal, which it includes."""
        expression = self.text(literal)
        special = expression.find("<[")
        if special >= 0:
            # Text ends at a special token by itself, and takes what stands before it.
            return f"{text} {expression[special:]}"
        return self.rule(f"{text} {expression}", "[lazy]")

    def has_special(self, text: str) -> bool:
        """Return True if the text begins with a special token, which free text cannot contain."""
        return self.text(text).startswith("<[")

    def terminal(self, name: str, expression: str) -> str:
        """Add a terminal; return its name."""
        self._rules.append(f"{name}: {expression}")
        return name

    def series(self, call: str, separator: str | None) -> str:
        """Return the expression of one call or more with a separator between them; None: of one."""
        return call if separator is None else self.rule(f"{call} ({self.text(separator)} {call})*")

    def any_of(self, expressions: Sequence[str]) -> str:
        """Add a rule for one of the expressions; return its name."""
        return self.rule(" | ".join(expressions))

    def json(self, schema: JsonObject) -> str:
        """Return the expression of a JSON value, written on one line."""
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_LAYOUT})}"

    def arguments(self, tool: Tool) -> str:
        """Return the expression of a tool's arguments as a JSON object."""
        return self.rule(self.json({**(tool.parameters or {}), "type": "object"}))

    def grammar(self, start: str) -> str:
        """Return the grammar whose text is the expression `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/", ""])


def marker_of(special_tokens: Mapping[str, int]) -> Marker:
    """Return a function that writes text as a Lark expression for one tokenizer.

    Args:
        special_tokens: Ids of the tokens that llguidance takes for special: those that are declared so, and added
            tokens of the form `<...>`. `special_token_ids` finds them.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")

    def marker(text: str) -> str:
        parts, position = [], 0
        for literal_match in pattern.finditer(text):
            parts += [_quoted(text[position : literal_match.start()]), f"<[{special_tokens[literal_match[0]]}]>"]
            position = literal_match.end()
        return " ".join(filter(None, [*parts, _quoted(text[position:])]))

    return marker


def special_token_ids(added_tokens: Mapping[str, tuple[int, bool]]) -> dict[str, int]:
    """Return the ids of the added tokens that llguidance takes for special.

    Args:
        added_tokens: Id of each added token, and True if the tokenizer declares it special.
    """
    return {
        token: token_id
        for token, (token_id, is_special) in added_tokens.items()
        if is_special or (token.startswith("<") and token.endswith(">"))
    }


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
