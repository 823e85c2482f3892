"""Limits of one API key: requests and tokens a minute, requests at once, and the output of one request."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice, takewhile

from replicas.errors import Overloaded

_MINUTE_S = 60.0
_IN_USE_S = 10.0
"""Time since its last use for which an ingress uses a key, seconds."""
_BURST = 0.7
"""Part of a minute's amount that all ingresses together give at once, where there are several."""
_MAX_REPORTED, _MAX_USES = 1000, 10_000


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt tokens and output tokens; the output is counted when the request ends."""
    max_concurrent_requests: int | None = None
    """Most requests that each ingress answers at once."""
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


@dataclass(frozen=True, slots=True)
class KeyShare:
    """Share of one ingress in the limits of a key."""

    num_ingresses: int = 1
    """Ingresses of the application."""
    num_using: int = 1
    """Ingresses that have lately answered requests with the key, this one included."""

    @property
    def of_rate(self) -> float:
        """Part of the key's rate."""
        return 1.0 / self.num_using

    @property
    def of_burst(self) -> float:
        """Part of a minute's amount that may be used at once."""
        return 1.0 if self.num_ingresses == 1 else _BURST / self.num_ingresses


WHOLE = KeyShare()
"""Share of an only ingress."""


class TokenBucket:
    """Token bucket that fills evenly, its share of a minute's amount in a minute, up to its share of a burst.

    Its level may fall below zero: output tokens are taken when a request ends, and their number is not known before.
    The bucket then first makes up for them.

    Invariant: the level never exceeds the share of a burst, which is at least one unit.
    """

    def __init__(self, per_minute: int, now_s: float, share: KeyShare = WHOLE) -> None:
        self._per_minute = per_minute
        self._share = share
        self._level = self._capacity
        self._filled_s = now_s

    @property
    def _capacity(self) -> float:
        return max(1.0, self._share.of_burst * self._per_minute)

    @property
    def _per_s(self) -> float:
        return self._share.of_rate * self._per_minute / _MINUTE_S

    def share(self, share: KeyShare, now_s: float) -> None:
        """Change the share from now on."""
        self._fill(now_s)
        self._share = share
        self._level = min(self._level, self._capacity)

    def take(self, amount: int, now_s: float) -> None:
        """Take an amount, whether the bucket has it or not."""
        self._fill(now_s)
        self._level -= amount

    def level(self, now_s: float) -> float:
        """Return what is left; below zero if more was taken."""
        self._fill(now_s)
        return self._level

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket has one unit; 0: it has one."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) / self._per_s)

    def allowance(self, now_s: float) -> Allowance:
        """Return what is left."""
        self._fill(now_s)
        reset_s = (self._capacity - self._level) / self._per_s
        return Allowance(self._per_minute, max(0, math.floor(self._level + 1e-9)), reset_s)

    def _fill(self, now_s: float) -> None:
        filled = (now_s - self._filled_s) * self._per_s
        self._level = min(self._capacity, self._level + max(0.0, filled))
        self._filled_s = now_s


class KeyUse:
    """Use of one key's limits by the requests of one ingress.

    Invariant: each `begin`, also one that raises, is followed by one `end`, so `num_running` is the number of open
    requests.
    """

    def __init__(self, limits: KeyLimits, monotonic: Callable[[], float], share: KeyShare = WHOLE) -> None:
        self.limits = limits
        self.num_running = 0
        self.used_s = monotonic()
        """Time of the last request, accepted or not, or of the last charge."""
        self._monotonic = monotonic
        now_s = monotonic()
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, now_s, share)
        self._tokens = None if tokens is None else TokenBucket(tokens, now_s, share)

    def begin(self) -> None:
        """Count a request that begins.

        Raises:
            Overloaded: a limit of the key is reached; the request counts as open until its `end`, and as no more.
        """
        limit = self.limits.max_concurrent_requests
        self.used_s = self._monotonic()  # Also if it is refused: the key is in use here.
        self.num_running += 1
        if limit is not None and self.num_running > limit:
            num_others = self.num_running - 1
            message = f"{num_others} requests of this API key are open; its max_concurrent_requests is {limit}"
            raise Overloaded(message, 1.0, "key_max_concurrent_requests", "rate_limit_exceeded")
        self._check("requests_per_minute", self._requests)
        self._check("tokens_per_minute", self._tokens)
        if self._requests is not None:
            self._requests.take(1, self.used_s)

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a request that has begun."""
        self.used_s = self._monotonic()
        if self._tokens is not None:
            self._tokens.take(num_tokens, self.used_s)

    def share(self, share: KeyShare) -> None:
        """Change this ingress's share in the limits."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.share(share, self._monotonic())

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


Peers = Callable[[], Sequence[frozenset[str]]]
"""Function that returns, for each other ingress, the keys that it has lately used."""


class KeyLimiter:
    """Limiter of the API keys of one ingress: one `KeyUse` for each key that has a limit.

    1. Ingresses tell each other about once a second which keys they have used in the last seconds.
    2. An ingress gives a key the part of its rate that falls to one of those that use it.
    3. At once it gives `_BURST` of a minute's amount, divided by the number of all ingresses.

    So a key that is used through one ingress gets its whole rate there. Eight ingresses together give it less than
    twice its amount in any minute, although they hear of each other a second late.

    Each ingress counts the open requests of a key for itself. A count that is a second old would refuse a client that
    sends one request after another.

    Invariants: at most `_MAX_USES` keys without open requests are kept; at most `_MAX_REPORTED` are reported.
    """

    def __init__(self, monotonic: Callable[[], float], peers: Peers = list) -> None:
        self._monotonic = monotonic
        self._peers = peers
        self._uses: OrderedDict[str, KeyUse] = OrderedDict()
        """Uses of the limits by key, the one used longest ago first."""

    def use_of(self, key_id: str | None, limits: KeyLimits) -> KeyUse | None:
        """Return the use of a key's limits; None: there is no key, or it has no limit. New limits begin unused."""
        if key_id is None or limits == NO_LIMITS:
            return None
        peers = self._peers()
        share = KeyShare(1 + len(peers), 1 + sum(key_id in keys for keys in peers))
        known = self._uses.get(key_id)
        if known is None or known.limits != limits:
            is_new = known is None
            known = self._uses[key_id] = KeyUse(limits, self._monotonic, share)
            if is_new:
                self._forget_beyond_limit()
        known.share(share)
        self._uses.move_to_end(key_id)
        return known

    def keys_in_use(self) -> frozenset[str]:
        """Return the keys with limits that have lately been used here, for the other ingresses."""
        since_s = self._monotonic() - _IN_USE_S
        recent = takewhile(lambda use: use[1].used_s >= since_s, reversed(self._uses.items()))
        return frozenset(key_id for key_id, _ in islice(recent, _MAX_REPORTED))

    def _forget_beyond_limit(self) -> None:
        """Forget the key used longest ago that has no open request, if there are too many; never the newest one."""
        if len(self._uses) > _MAX_USES:
            *older, _ = self._uses.items()
            idle = next((key_id for key_id, use in older if not use.num_running), None)
            if idle is not None:
                del self._uses[idle]
