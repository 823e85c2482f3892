"""Hand-made requests, as the load generator would have seen them."""

from typing import Any

from bench.routing.offer import Offered
from serve_app.benchmark.rows import Row


def row(scheduled_s: float = 0.0, chunks: tuple[tuple[float, int], ...] = (), **changes: Any) -> Row:
    """Return a request that left on time, with chunks at these times of so many tokens."""
    fields: dict[str, Any] = {
        "index": 0, "stream": "s", "priority": 0, "num_prompt_tokens": 10,
        "num_output_tokens": sum(count for _, count in chunks), "scheduled_s": scheduled_s, "sent_s": scheduled_s,
        "last_sent_s": scheduled_s, "end_s": chunks[-1][0] if chunks else scheduled_s, "status": 200, "num_attempts": 1,
        "finish_reason": "length" if chunks else None, "chunk_s": [at_s for at_s, _ in chunks],
        "chunk_tokens": [count for _, count in chunks],
    }  # fmt: skip
    return Row(**{**fields, **changes})


def offered(*rows: Row) -> Offered:
    """Return a load of these requests that began at unix time 1000."""
    return Offered({"is_void": False}, list(rows), 1000.0)
