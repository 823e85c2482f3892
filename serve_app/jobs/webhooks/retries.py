"""When a webhook that failed is tried again."""

from __future__ import annotations

import random

from serve_app.jobs.webhooks.events import Delivery

MAX_AGE_S = 72 * 3600.0
"""No attempt is made later after the event than this."""

_FIRST_DELAY_S = 5.0
_MAX_DELAY_S = 4 * 3600.0
_MAX_DOUBLINGS = 20


def next_attempt_unix_s(delivery: Delivery, now_unix_s: float, rng: random.Random) -> float | None:
    """When to try again after an attempt that failed just now; None: never.

    1. The first delay is 5 s; each is twice the one before, up to 4 hours.
    2. Each is drawn within a quarter of that, so that what failed together does not come back together.
    3. What would come more than 72 hours after the event does not come.
    """
    doubled_s = _FIRST_DELAY_S * 2.0 ** min(delivery.num_attempts, _MAX_DOUBLINGS)
    at_unix_s = now_unix_s + min(_MAX_DELAY_S, doubled_s) * rng.uniform(0.75, 1.25)
    return at_unix_s if at_unix_s <= delivery.created_unix_s + MAX_AGE_S else None
