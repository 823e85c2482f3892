"""Generator of docs/clients.md: `python -m bench.clients.page > docs/clients.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.performance_page import origin
from bench.record import RESULTS

NAME = "clients"
WAYS = ("text", "stream", "structured", "tools")
EMBEDDINGS = "embeddings"
"""The only way of some clients."""
GATE = (
    "openai-python", "openai-node", "openai-agents", "langchain", "pydantic-ai", "instructor", "litellm", "llama-index",
    "ai-sdk", "openai-responses", "openai-responses-node", "openai-agents-responses", "openai-stored",
    "openai-stored-node", "openai-agents-stored", "litellm-responses", "codex", "anthropic-python", "anthropic-node",
    "langchain-anthropic", "litellm-anthropic",
)  # fmt: skip
"""Clients that the server must serve in all ways."""

_INTRODUCTION = """# Clients

Stock clients against a served application: text, a stream, structured output, tools, and embeddings that are
searched. `python -m bench.clients` runs a program for each (`bench/clients/programs`) against a tiny scripted
model, and `python -m bench.clients.page > docs/clients.md` makes this page.
Rows named `stored` have background, resumed streams, chains and conversations.

A client's base URL is the server's address, such as `http://127.0.0.1:8000/v1`; any API key does without a key file.
In Codex it is `base_url` of a provider with `wire_api = "responses"`. Anthropic's clients take the
address without `/v1`, Claude Code as `ANTHROPIC_BASE_URL`. It takes an unknown context for a million tokens:
set `CLAUDE_CODE_AUTO_COMPACT_WINDOW` to the real number, at least 100000.
litellm needs `mcp` for tools. A dash: no such feature.
"""


def page() -> str:
    """Return the page."""
    return "\n".join(_lines(json.loads((RESULTS / f"{NAME}.json").read_text()))) + "\n"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield _INTRODUCTION
    notes: list[str] = []
    tables = {WAYS: "text | stream | structured output | tools", (EMBEDDINGS,): EMBEDDINGS}
    for ways, titles in tables.items():
        yield f"| client | versions | {titles} |"
        yield "|---" * (2 + len(ways)) + "|"
        for name, outcome in result["clients"].items():
            if name.endswith(f"-{EMBEDDINGS}") == (EMBEDDINGS in ways):
                yield _row(name, outcome, ways, notes)
        yield ""
    if notes:
        yield from (f"- {note}" for note in notes)
        yield ""
    yield origin(NAME, result)


def _row(name: str, outcome: dict[str, Any], ways: tuple[str, ...], notes: list[str]) -> str:
    """Return the row of a client; reasons of failures become notes."""
    versions = ", ".join(f"{package} {number}" for package, number in outcome.get("versions", {}).items())
    cells = [_cell(outcome["ways"].get(way), name, way, notes) for way in ways]
    if "reason" in outcome:
        notes.append(f"{name}: {_line(outcome['reason'])}")
    return f"| {name} | {versions or '-'} | {' | '.join(cells)} |"


def _cell(way: dict[str, str] | None, name: str, title: str, notes: list[str]) -> str:
    """Return the cell of a way; the reason of a failure becomes a note."""
    if way is None:
        return "-"
    if "reason" in way:
        notes.append(f"{name}, {title}: {_line(way['reason'])}")
    return way["outcome"]


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    print(page(), end="")
