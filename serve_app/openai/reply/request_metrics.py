"""Object `metrics` of replies: the parts of a request's time."""

from __future__ import annotations

from typing import Any

from router.timeline import Part, Timeline, queued_s

_PARTS = tuple((part, part.value) for part in Part)


def request_metrics(timeline: Timeline, now: float) -> dict[str, Any]:
    """Return the object; the first five fields are vLLM's, and `parts_ms` adds up to `total_ms`."""
    seconds, num_tokens = timeline.seconds(now), timeline.num_output_tokens
    before_s = seconds[Part.PREFILL] + seconds[Part.PREEMPTED] + seconds[Part.MIGRATED]
    decode_s, has_output = seconds[Part.DECODE], num_tokens > 0
    return {
        "time_to_first_token_ms": _ms(seconds[Part.PREFILL]) if has_output else None,
        "generation_time_ms": _ms(decode_s) if has_output else None,
        "queue_time_ms": _ms(queued_s(seconds)),
        "mean_itl_ms": _ms(decode_s / (num_tokens - 1)) if num_tokens > 1 else None,
        "tokens_per_second": _rate(num_tokens, before_s + decode_s),
        "total_ms": _ms(timeline.total_s(now)),
        "parts_ms": {name: _ms(seconds[part]) for part, name in _PARTS},
        "placements": [
            {"replica_id": placed.replica_id, "reason": placed.reason.value, "after_ms": _ms(placed.after_s)}
            for placed in timeline.placements
        ],
        "cached_tokens": timeline.cached_tokens,
        "num_preemptions": timeline.num_preemptions,
        "num_migrations": timeline.num_migrations,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(num_tokens: int, seconds: float) -> float | None:
    return round(num_tokens / seconds, 3) if num_tokens > 0 and seconds > 0 else None
