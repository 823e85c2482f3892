"""Reader of text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

ResultT = TypeVar("ResultT")

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")

Wait = Generator[None, None, ResultT]
"""Steps of a read: they yield while a decision needs more text, and return the read's result."""


class Reader:
    """Cursor over text that arrives in pieces.

    A method that returns `Wait` decides only what all further text leaves as it is. So the result does not depend on
    how the text was split.

    Invariants: 0 <= `held` <= `position` <= len(`text`). Text before `held` is settled and dropped.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        """Place of the next character to read."""
        self.held = 0
        """Begin of the text that is read but not settled."""
        self.is_complete = False
        """True if no more text arrives."""

    def push(self, text: str) -> None:
        """Append text."""
        self.text += text

    def settle(self) -> None:
        """Settle everything before the cursor; it cannot be read again."""
        self.text = self.text[self.position :]
        self.position = self.held = 0

    def rewind(self) -> None:
        """Move the cursor back to the begin of the text that is not settled."""
        self.position = self.held

    def rest(self) -> str:
        """Return the text behind the cursor that has arrived."""
        return self.text[self.position :]

    def has_more(self) -> Wait[bool]:
        """Wait for a character behind the cursor; return False at the end of the text."""
        while self.position >= len(self.text):
            if self.is_complete:
                return False
            yield
        return True

    def peek(self) -> Wait[str]:
        """Return the next character without reading it, or an empty string at the end."""
        return self.text[self.position] if (yield from self.has_more()) else ""

    def skip_space(self) -> Wait[str]:
        """Move behind white space; return the next character without reading it, or an empty string at the end."""
        while (char := (yield from self.peek())).isspace():
            self.position += 1
        return char

    def accept(self, literals: Sequence[str]) -> Wait[str | None]:
        """Move behind the first of the literals that the text goes on with; return it, or None if there is none."""
        for literal in literals:
            while len(self.text) - self.position < len(literal) and not self.is_complete:
                if not literal.startswith(self.rest()):
                    break
                yield
            if self.text.startswith(literal, self.position):
                self.position += len(literal)
                return literal
        return None

    def accept_words(self, literal: str) -> Wait[bool]:
        """Move behind the literal; white space may stand before each of its words, and need not stand between them."""
        for word in literal.split():
            yield from self.skip_space()
            if (yield from self.accept((word,))) is None:
                return False
        return True

    def read_until(self, literal: str) -> Wait[str | None]:
        """Move behind the next occurrence of the literal; return the text before it, or None if there is none."""
        searched = self.position
        while True:
            end = self.text.find(literal, searched)
            if end >= 0:
                text = self.text[self.position : end]
                self.position = end + len(literal)
                return text
            if self.is_complete:
                return None
            searched = max(self.position, len(self.text) - len(literal) + 1)
            yield

    def read_name(self) -> Wait[str]:
        """Read the characters that may stand in a tool's name or a call's id."""
        start = self.position
        while (yield from self.has_more()):
            name = _NAME.match(self.text, self.position)
            assert name is not None
            self.position = name.end()
            if self.position < len(self.text):
                break
        return self.text[start : self.position]

    def read_text(self, markers: Sequence[str], report: Callable[[str], None]) -> Wait[str | None]:
        """Report the text up to the next of the markers, and settle it.

        White space before the marker is not reported. The cursor stays before that white space.

        Returns:
            The marker, or None at the end of the text.
        """
        pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        while True:
            hit = pattern.search(self.text, self.position)
            end = hit.start() if hit else len(self.text)
            if hit is None and not self.is_complete:
                end -= _num_undecided(self.text[self.position :], markers)
            if hit or not self.is_complete:
                end = self.position + len(self.text[self.position : end].rstrip())
            report(self.text[self.position : end])
            self.position = end
            self.settle()
            if hit or self.is_complete:
                return hit[0] if hit else None
            yield


def _num_undecided(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of the text with which a marker may begin."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
