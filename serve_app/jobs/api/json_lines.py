"""Lines of JSON files."""

from __future__ import annotations

_LINE_BREAKS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


def on_one_line(text: bytes) -> bytes:
    """Return JSON without the characters that Python's and httpx's line readers, unlike JSON, treat as line breaks."""
    for character, escape in _LINE_BREAKS:
        text = text.replace(character, escape)
    return text
