"""Output of the commands: consoles, errors, tables and dates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

_WIDTH_OF_PIPE = 200
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


def stderr() -> Console:
    """Return a console on stderr, for output that scripts do not read."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """End the command with a message on stderr and exit code 1."""
    stderr().print(f"error: {message}", markup=False)
    raise typer.Exit(1) from None


def message_of(error: Exception) -> str:
    """Return an error's message; one of the system has its file and no number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _ERROR_NUMBER.sub("", str(error)) or type(error).__name__


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines to stdout; a pipe gets every cell whole, whatever the width."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH_OF_PIPE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def date_text(unix_s: float) -> str:
    """Return a moment in local time, to the minute."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units, such as `2 min 10 s`; below a minute in seconds."""
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 replica` or `1,200 replicas`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,.0f} {noun}{ending}"
