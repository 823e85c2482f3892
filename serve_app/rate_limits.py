"""Limits of one API key: requests and tokens a minute, requests at once, and the output of one request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from replicas.errors import Overloaded

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key in one ingress; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt tokens and output tokens; the output is counted when the request ends."""
    max_concurrent_requests: int | None = None
    """Most requests that are answered at once."""
    max_tokens: int | None = None
    """Most output tokens of one sequence."""

    @classmethod
    def of(cls, owner: Mapping[str, object]) -> KeyLimits:
        """Return the limits in a key file's entry.

        Raises:
            ValueError: a limit is no whole number above 0; the message names it.
        """
        given = {field.name: owner[field.name] for field in fields(cls) if owner.get(field.name) is not None}
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}` is `{value}`; it must be a whole number above 0")
        return cls(**given)  # type: ignore[arg-type]  # checked above


NO_LIMITS = KeyLimits()
"""Limits of a key whose entry names none, and of requests without a key."""
KEY_LIMIT_NAMES = frozenset(field.name for field in fields(KeyLimits))
"""Names of the limits in a key file."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Allowance of one kind, requests or tokens, and what is left of it."""

    limit: int
    num_left: int
    reset_s: float | None
    """Seconds until all of it is left again; None: unknown."""


class TokenBucket:
    """Token bucket that fills evenly, a minute's amount in a minute, up to that amount.

    Its level may fall below zero: output tokens are taken when a request ends, and its number is not known before. The
    bucket then first makes up for them.

    Invariant: the level never exceeds `per_minute`.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def take(self, amount: int, now_s: float) -> None:
        """Take an amount, whether the bucket has it or not."""
        self._fill(now_s)
        self._level -= amount

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket has one unit; 0: it has one."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) * _MINUTE_S / self._per_minute)

    def allowance(self, now_s: float) -> Allowance:
        """Return what is left."""
        self._fill(now_s)
        reset_s = (self._per_minute - self._level) * _MINUTE_S / self._per_minute
        return Allowance(self._per_minute, max(0, math.floor(self._level + 1e-9)), reset_s)

    def _fill(self, now_s: float) -> None:
        filled = (now_s - self._filled_s) * self._per_minute / _MINUTE_S
        self._level = min(float(self._per_minute), self._level + max(0.0, filled))
        self._filled_s = now_s


class KeyUse:
    """Use of one key's limits by the requests of one ingress.

    Invariant: each `begin`, also one that raises, is followed by one `end`, so `num_running` is the number of open
    requests.
    """

    def __init__(self, limits: KeyLimits, monotonic: Callable[[], float]) -> None:
        self.limits = limits
        self.num_running = 0
        self._monotonic = monotonic
        now_s = monotonic()
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, now_s)
        self._tokens = None if tokens is None else TokenBucket(tokens, now_s)

    def begin(self) -> None:
        """Count a request that begins.

        Raises:
            Overloaded: a limit of the key is reached; the request counts as open until its `end`, and as no more.
        """
        limit = self.limits.max_concurrent_requests
        self.num_running += 1
        if limit is not None and self.num_running > limit:
            num_others = self.num_running - 1
            message = f"{num_others} requests of this API key are open; its max_concurrent_requests is {limit}"
            raise Overloaded(message, 1.0, "key_max_concurrent_requests", "rate_limit_exceeded")
        self._check("requests_per_minute", self._requests)
        self._check("tokens_per_minute", self._tokens)
        if self._requests is not None:
            self._requests.take(1, self._monotonic())

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a request that has begun."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._monotonic())

    def end(self) -> None:
        """Note that a request has ended."""
        self.num_running -= 1

    def requests(self) -> Allowance | None:
        """Return the requests that are left; None: they have no limit."""
        return None if self._requests is None else self._requests.allowance(self._monotonic())

    def tokens(self) -> Allowance | None:
        """Return the tokens that are left; None: they have no limit."""
        return None if self._tokens is None else self._tokens.allowance(self._monotonic())

    def _check(self, name: str, bucket: TokenBucket | None) -> None:
        wait_s = 0.0 if bucket is None else bucket.wait_s(self._monotonic())
        if wait_s > 0:
            limit = getattr(self.limits, name)
            message = f"this API key has used up its {name}, {limit}; the next is due in {wait_s:.1f} s"
            raise Overloaded(message, wait_s, f"key_{name}", "rate_limit_exceeded")


class KeyLimiter:
    """Limiter of the API keys of one ingress: one `KeyUse` for each key that has a limit.

    With several ingresses each one has the whole limit: a key's requests are spread over them, so that the key gets up
    to as many times its limit as there are ingresses.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._uses: dict[str, KeyUse] = {}

    def use_of(self, key_id: str | None, limits: KeyLimits) -> KeyUse | None:
        """Return the use of a key's limits; None: there is no key, or it has no limit. New limits begin unused."""
        if key_id is None or limits == NO_LIMITS:
            return None
        known = self._uses.get(key_id)
        if known is None or known.limits != limits:
            known = self._uses[key_id] = KeyUse(limits, self._monotonic)
        return known
