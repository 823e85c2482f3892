"""Memory of this process. The module imports no torch."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def own_bytes(status: Path = _STATUS) -> int | None:
    """Return the memory that this process holds alone, without files that it maps; None if the system does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(found) if found else None
