"""Retry schedule of webhooks: exponential backoff with jitter."""

from __future__ import annotations

import random

from serve_app.jobs.webhooks.events import Delivery

MAX_AGE_S = 72 * 3600.0
"""Seconds after the event at which attempts end."""

_FIRST_DELAY_S = 5.0
_MAX_DELAY_S = 4 * 3600.0
_MAX_DOUBLINGS = 20


def next_attempt_unix_s(delivery: Delivery, now_unix_s: float, rng: random.Random) -> float | None:
    """Return the time of the next attempt, as unix seconds, after one that failed just now; None: there is none.

    1. The first delay is 5 s; each further delay is twice the one before, up to 4 hours.
    2. Each delay is varied at random by up to a quarter, so that deliveries that failed together spread out.
    3. There is no attempt later than 72 hours after the event.
    """
    doubled_s = _FIRST_DELAY_S * 2.0 ** min(delivery.num_attempts, _MAX_DOUBLINGS)
    at_unix_s = now_unix_s + min(_MAX_DELAY_S, doubled_s) * rng.uniform(0.75, 1.25)
    return at_unix_s if at_unix_s <= delivery.created_unix_s + MAX_AGE_S else None
