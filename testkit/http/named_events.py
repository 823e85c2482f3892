"""Named server-sent events of whole streams, as agents' clients read them."""

from __future__ import annotations

import json
from typing import Any


def read_named(text: str) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """Return the events of a whole stream with their names, and True if `[DONE]` ends it. Comments are left out."""
    *parts, rest = text.split("\n\n")
    assert not rest, rest
    parts = [part for part in parts if not part.startswith(":")]
    is_done = parts[-1:] == ["data: [DONE]"]
    events = []
    for part in parts[: len(parts) - is_done]:
        name, data = part.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events, is_done
