"""Answers on a terminal: Markdown that is rendered while it comes, and plain text where nothing can be rendered."""

from __future__ import annotations

import os
import re
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from unicodedata import category

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

_DRAWING_SHARE = 0.2
"""Most of the time that drawing takes; deltas that come sooner wait for the next one."""
_FREE_LINES = 2
"""Lines of the screen above a block that grows."""


@contextmanager
def plain_writer() -> Iterator[Callable[[str], None]]:
    """Give a function that writes text to standard output at once, and end its last line.

    A terminal does not get control characters, which could change its state.
    """
    is_terminal = sys.stdout.isatty()
    has_written = False

    def write(text: str) -> None:
        nonlocal has_written
        has_written = True
        sys.stdout.write(_printable(text) if is_terminal else text)
        sys.stdout.flush()

    try:
        yield write
    except Exception:
        print(end="\n" if has_written else "")  # The error has a line of its own.
        raise
    print()


@contextmanager
def answer_writer() -> Iterator[Callable[[str], None]]:
    """Give a function that writes an answer to standard output as it comes, and end its last line.

    A terminal that has colours and can move its cursor gets rendered Markdown; all else gets the text as it is.
    """
    console = Console(highlight=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal or console.no_color:
        with plain_writer() as write:
            yield write
        return
    view = MarkdownView(console)
    with _without_echo():
        try:
            yield view.write
        finally:
            view.close()


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keep the keys that are typed out of the drawing; the next prompt shows them."""
    try:
        is_in_foreground = os.tcgetpgrp(0) == os.getpgrp()  # another process must not change the terminal
    except OSError:
        is_in_foreground = False
    if not is_in_foreground:
        yield
        return
    before = termios.tcgetattr(0)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(0, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


class MarkdownView:
    """Markdown on a terminal that grows at its end.

    1. Lines that are complete are parsed. A top-level block that another one follows cannot change any more.
    2. Such a block is printed once, whole, and is never drawn again.
    3. The last block and the line that is incomplete are drawn anew with each part of the text, in place. Of one that
       is higher than the screen the last lines are shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._live: Live | None = None
        self._is_first = True
        self._next_s = 0.0

    def write(self, text: str) -> None:
        """Add text at the end, and show it."""
        self._text += _printable(text)
        lines = self._text.splitlines(keepends=True)
        num_whole = len(lines) - (not self._text.endswith("\n"))
        starts = _starts("".join(lines[:num_whole]))
        for start, end in pairwise(starts):
            self._finish("".join(lines[start:end]))
        if len(starts) > 1:
            self._text = "".join(lines[starts[-1] :])
        self._draw()

    def close(self) -> None:
        """Print what is left."""
        self._finish(self._text)
        self._text = ""

    def _draw(self) -> None:
        started_s = time.monotonic()
        if started_s < self._next_s or not self._text.strip():
            return
        height = max(1, self._console.height - _FREE_LINES)
        self._shown().update(_Block(self._text, self._is_first, height), refresh=True)
        ended_s = time.monotonic()
        self._next_s = ended_s + (ended_s - started_s) * (1 / _DRAWING_SHARE - 1)

    def _finish(self, text: str) -> None:
        """Print a block in the place of its last drawing."""
        if text.strip():
            live = self._shown()
            live.update(_Block(text, self._is_first))
            live.stop()  # which draws the block whole
            self._live, self._is_first, self._next_s = None, False, 0.0

    def _shown(self) -> Live:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self._live


class _Block:
    """Rendered Markdown with an empty line above it, except above the first block.

    Of more than `height` lines it has the last ones. Markdown whose rendering would lack a character of its text, as
    a table does whose columns are too narrow for their words or too few for its cells, is shown as it was written.
    """

    def __init__(self, text: str, is_first: bool, height: int | None = None) -> None:
        self._text, self._is_first, self._height = text.strip("\n"), is_first, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tokens = _parsed(self._text)
        lines = _without_empty_ends(console.render_lines(_markdown(tokens), options, pad=False))
        shown = _characters(segment.text for line in lines for segment in line)
        if _has_more_cells(tokens, self._text.splitlines()) or not _characters(_content(tokens)) <= shown:
            lines = console.render_lines(Text(self._text, overflow="fold"), options, pad=False)
        if not self._is_first:
            lines = [[], *lines]
        for line in lines if self._height is None else lines[-self._height :]:
            yield from line
            yield Segment.line()


_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["image", "reference"])
"""Parser of what rich can show: tags, images and definitions of links stay text, which rich would leave out."""


_CELL_END, _EDGES = re.compile(r"(?<!\\)\|"), re.compile(r"^[>\s]*\||(?<!\\)\|\s*$")


def _parsed(text: str) -> list[Token]:
    """Return the tokens of a text, in which a line ends as in the text."""
    tokens = _PARSER.parse(text)
    for token in tokens:
        for child in token.children or ():
            child.type = "hardbreak" if child.type == "softbreak" else child.type
    return tokens


def _markdown(tokens: list[Token]) -> Markdown:
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = tokens
    return markdown


def _starts(text: str) -> list[int]:
    """Return the first line of each top-level block, counted from 0."""
    return [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.nesting >= 0 and token.map]


def _has_more_cells(tokens: list[Token], lines: list[str]) -> bool:
    """Return True if a row of a table has more cells than the table has columns; the parser leaves them out."""
    tables = [lines[slice(*token.map)] for token in tokens if token.type == "table_open" and token.map]
    numbers = [[len(_CELL_END.findall(_EDGES.sub("", line))) for line in table] for table in tables]
    return any(max(of_lines) > of_lines[1] for of_lines in numbers)


def _content(tokens: list[Token]) -> Iterator[str]:
    """Yield the texts in tokens, without their marks."""
    for token in tokens:
        if token.children is None:
            yield token.content
        else:
            yield from (child.content for child in token.children)


def _characters(texts: Iterator[str]) -> Counter[str]:
    return Counter("".join("".join(texts).split()))


def _without_empty_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    filled = [i for i, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return lines[filled[0] : filled[-1] + 1] if filled else lines


def _printable(text: str) -> str:
    """Return a text without the control characters other than line feed and tab."""
    return "".join(character for character in text if character in "\n\t" or category(character) != "Cc")
