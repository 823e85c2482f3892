"""Retry rule of the OpenAI SDKs."""

from __future__ import annotations

import random
from collections.abc import Mapping

MAX_ATTEMPTS = 3
_LONGEST_OBEYED_S = 120.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 8.0


def retry_delay_s(
    status: int | None, headers: Mapping[str, str], num_attempts: int, rng: random.Random
) -> float | None:
    """Return the seconds until openai-python retries a request; None if it gives up.

    Retried are 408, 409, 429, every 5xx and failed connections (`status` None). `x-should-retry: true` makes any other
    status retried too; `false`, or a `Retry-After` above two minutes, forbids a retry. A shorter `Retry-After` is
    obeyed. Otherwise the wait doubles from half a second to eight, less a random part of up to a quarter.
    """
    if num_attempts >= MAX_ATTEMPTS:
        return None
    asked_s = _retry_after_s(headers)
    if asked_s is not None and asked_s > _LONGEST_OBEYED_S:
        return None
    says = headers.get("x-should-retry")
    is_transient = status is None or status in (408, 409, 429) or status >= 500
    if says == "false" or (says != "true" and not is_transient):
        return None
    if asked_s is not None and asked_s > 0:
        return asked_s
    delay_s = min(_FIRST_DELAY_S * 2.0 ** (num_attempts - 1), _LONGEST_DELAY_S)
    return delay_s * (1 - 0.25 * rng.random())


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
    return None
