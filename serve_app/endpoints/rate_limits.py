"""The `x-ratelimit-*` headers, as OpenAI's clients read them."""

from __future__ import annotations

import math

from router.types import Headroom
from serve_app.errors import Headers


def rate_limit_headers(headroom: Headroom) -> Headers:
    """What may wait in the request's band, how much more may, and when nothing would wait there any more."""
    headers = [
        ("x-ratelimit-limit-requests", str(headroom.max_requests)),
        ("x-ratelimit-limit-tokens", str(headroom.max_tokens)),
        ("x-ratelimit-remaining-requests", str(headroom.num_requests_left)),
        ("x-ratelimit-remaining-tokens", str(headroom.num_tokens_left)),
    ]
    if headroom.reset_s is not None:
        reset = duration_text(headroom.reset_s)
        headers += [("x-ratelimit-reset-requests", reset), ("x-ratelimit-reset-tokens", reset)]
    return tuple(headers)


def duration_text(seconds: float) -> str:
    """`0s`, `20ms`, `8.64s`, `6m0s` or `1h2m3s`; never less than `seconds`."""
    # What is less than a microsecond is the error of a floating-point number.
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, whole_seconds = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{whole_seconds}s" if hours else f"{minutes}m{whole_seconds}s"
