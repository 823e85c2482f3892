"""Limits of one API key: requests and tokens a minute, requests at once, and the output of one request."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from replicas.errors import Overloaded

_MINUTE_S = 60.0
MAX_PEER_AGE_S = 10.0
"""Age at which the last report of another ingress is forgotten, seconds."""
_REPORTED_S = 2 * _MINUTE_S
"""Time since its last use for which a key is reported to the other ingresses, seconds."""
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
class KeyTotals:
    """Use of one API key in one ingress, and what is left of its limits as far as that ingress knows."""

    key_id: str
    num_requests: int
    """Requests that the ingress has accepted since it first used the key; the total never falls."""
    num_tokens: int
    """Tokens that it has charged since then."""
    requests_left: float | None
    """Level of its bucket of requests, below 0 if too many were used; None: requests have no limit."""
    tokens_left: float | None
    """Level of its bucket of tokens."""


@dataclass(frozen=True, slots=True)
class KeyUseReport:
    """Report of one ingress to the others: the use of the keys that it has lately served.

    The totals stay bytes until an ingress reads them, so a replica hands them on cheaply. The bytes are those of a list
    of rows: pickling calls Python for each object of our classes.
    """

    ingress_id: str
    number: int
    """Number of the report among those of its ingress."""
    packed: bytes
    """Totals, pickled."""

    @classmethod
    def of(cls, ingress_id: str, number: int, totals: Iterable[KeyTotals]) -> KeyUseReport:
        """Return the report with these totals."""
        rows = [
            (each.key_id, each.num_requests, each.num_tokens, each.requests_left, each.tokens_left) for each in totals
        ]
        return cls(ingress_id, number, pickle.dumps(rows, pickle.HIGHEST_PROTOCOL))

    def totals(self) -> list[KeyTotals]:
        """Return the totals."""
        return [KeyTotals(*row) for row in pickle.loads(self.packed)]


class TokenBucket:
    """Token bucket that fills evenly, a minute's amount in a minute, up to that amount.

    Its level may fall below zero: output tokens are taken when a request ends, and its number is not known before, and
    other ingresses' use is taken when they report it. The bucket then first makes up for them.

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

    def level(self, now_s: float) -> float:
        """Return what is left; below zero if more was taken."""
        self._fill(now_s)
        return self._level

    def take_from_peer(self, total: int, known_total: int | None, peer_level: float | None, now_s: float) -> None:
        """Take what another ingress has used since its last report: `total` less `known_total`.

        `known_total` is None if the last report is not known. Then a total that `peer_level` explains is recent use.
        Otherwise the bucket falls to `peer_level`, if that is lower: most of the use has been filled up since. If the
        last report was forgotten, recent use may be taken a second time, about a minute's amount at most.
        """
        self._fill(now_s)
        if known_total is not None:
            # A total falls if the other ingress had forgotten the key.
            self._level -= total - known_total if total >= known_total else total
        elif peer_level is not None:
            is_recent = self._is_recent(total, peer_level)
            self._level = self._level - total if is_recent else min(self._level, peer_level)

    def begin_beside(self, peers: Iterable[tuple[int, float | None]], now_s: float) -> None:
        """Leave at most what other ingresses know to be left; they are given by their totals and levels."""
        known = [(total, level) for total, level in peers if level is not None]
        num_recent = sum(total for total, level in known if self._is_recent(total, level))
        self._fill(now_s)
        self._level = min([self._level - num_recent, *(level for _, level in known)])

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket has one unit; 0: it has one."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) * _MINUTE_S / self._per_minute)

    def allowance(self, now_s: float) -> Allowance:
        """Return what is left."""
        self._fill(now_s)
        reset_s = (self._per_minute - self._level) * _MINUTE_S / self._per_minute
        return Allowance(self._per_minute, max(0, math.floor(self._level + 1e-9)), reset_s)

    def _is_recent(self, total: int, level: float) -> bool:
        """Return True if all use may have been taken from the level, so that none has been filled up since."""
        return total <= self._per_minute - level + 1

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
        self.used_s = monotonic()
        """Time of the last request or charge."""
        self._num_requests = 0
        self._num_tokens = 0
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
        self._num_requests += 1
        self.used_s = self._monotonic()
        if self._requests is not None:
            self._requests.take(1, self.used_s)

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a request that has begun."""
        self._num_tokens += num_tokens
        self.used_s = self._monotonic()
        if self._tokens is not None:
            self._tokens.take(num_tokens, self.used_s)

    def end(self) -> None:
        """Note that a request has ended."""
        self.num_running -= 1

    def requests(self) -> Allowance | None:
        """Return the requests that are left; None: they have no limit."""
        return None if self._requests is None else self._requests.allowance(self._monotonic())

    def tokens(self) -> Allowance | None:
        """Return the tokens that are left; None: they have no limit."""
        return None if self._tokens is None else self._tokens.allowance(self._monotonic())

    def totals(self, key_id: str) -> KeyTotals:
        """Return the use here, for the other ingresses."""
        requests, tokens, now_s = self._requests, self._tokens, self._monotonic()
        return KeyTotals(
            key_id,
            self._num_requests,
            self._num_tokens,
            None if requests is None else requests.level(now_s),
            None if tokens is None else tokens.level(now_s),
        )

    def take_in(self, totals: KeyTotals, known: KeyTotals | None) -> None:
        """Take another ingress's use from the buckets; `known`: its last report, None without one."""
        now_s = self._monotonic()
        if self._requests is not None:
            before = None if known is None else known.num_requests
            self._requests.take_from_peer(totals.num_requests, before, totals.requests_left, now_s)
        if self._tokens is not None:
            before = None if known is None else known.num_tokens
            self._tokens.take_from_peer(totals.num_tokens, before, totals.tokens_left, now_s)

    def begin_beside(self, peers: Sequence[KeyTotals]) -> None:
        """Leave at most what other ingresses know to be left, of a key that has not been used here."""
        now_s = self._monotonic()
        if self._requests is not None:
            self._requests.begin_beside([(peer.num_requests, peer.requests_left) for peer in peers], now_s)
        if self._tokens is not None:
            self._tokens.begin_beside([(peer.num_tokens, peer.tokens_left) for peer in peers], now_s)

    def _check(self, name: str, bucket: TokenBucket | None) -> None:
        wait_s = 0.0 if bucket is None else bucket.wait_s(self._monotonic())
        if wait_s > 0:
            limit = getattr(self.limits, name)
            message = f"this API key has used up its {name}, {limit}; the next is due in {wait_s:.1f} s"
            raise Overloaded(message, wait_s, f"key_{name}", "rate_limit_exceeded")


@dataclass(frozen=True, slots=True)
class _Peer:
    """Last report of another ingress."""

    received_s: float
    number: int
    totals: Mapping[str, KeyTotals]


class KeyLimiter:
    """Limiter of the API keys of one ingress: one `KeyUse` for each key that has a limit.

    Ingresses tell each other the totals of the keys that they have lately served, once a second. What the others have
    used is taken from the buckets here. So all of them together give a key its amount of requests and tokens, and what
    they accept before they hear of each other: usually the use of two seconds. A key that is new here begins with
    what the others have left of it, and so does one that has had no report for `MAX_PEER_AGE_S`. What an ingress used
    that has died is filled up like other use.

    Each ingress counts the open requests of a key for itself. A count that is a second old would refuse a client that
    sends one request after another.

    Invariants: at most `_MAX_USES` keys without open requests are kept; at most `_MAX_REPORTED` are reported.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._uses: OrderedDict[str, KeyUse] = OrderedDict()
        """Uses of the limits by key, the one used longest ago first."""
        self._peers: dict[str, _Peer] = {}

    def use_of(self, key_id: str | None, limits: KeyLimits) -> KeyUse | None:
        """Return the use of a key's limits; None: there is no key, or it has no limit. New limits begin unused."""
        if key_id is None or limits == NO_LIMITS:
            return None
        known = self._uses.get(key_id)
        if known is None or known.limits != limits:
            is_new = known is None
            known = self._uses[key_id] = KeyUse(limits, self._monotonic)
            if is_new:
                peers = self._recent_peers().values()
                known.begin_beside([peer.totals[key_id] for peer in peers if key_id in peer.totals])
                self._forget_beyond_limit()
        self._uses.move_to_end(key_id)
        return known

    def totals(self) -> tuple[KeyTotals, ...]:
        """Return the use of the keys used here lately, for the other ingresses."""
        since_s, found = self._monotonic() - _REPORTED_S, list[KeyTotals]()
        for key_id, use in reversed(self._uses.items()):
            if len(found) == _MAX_REPORTED:
                break
            if use.used_s >= since_s:
                found.append(use.totals(key_id))
        return tuple(found)

    def take_in(self, reports: Sequence[KeyUseReport]) -> None:
        """Take in the last reports of the other ingresses; one that is not newer than the known one changes nothing."""
        recent = self._recent_peers()
        for report in reports:
            peer = self._peers.get(report.ingress_id)
            if peer is None or report.number > peer.number:
                before = recent[report.ingress_id].totals if report.ingress_id in recent else {}
                totals = {each.key_id: each for each in report.totals()}
                for key_id in totals.keys() & self._uses.keys():
                    self._uses[key_id].take_in(totals[key_id], before.get(key_id))
                self._peers[report.ingress_id] = _Peer(self._monotonic(), report.number, totals)
        self._peers = self._recent_peers()

    def _recent_peers(self) -> dict[str, _Peer]:
        """Return the last reports of the other ingresses, except those that are too old."""
        since_s = self._monotonic() - MAX_PEER_AGE_S
        return {ingress_id: peer for ingress_id, peer in self._peers.items() if peer.received_s >= since_s}

    def _forget_beyond_limit(self) -> None:
        """Forget the key used longest ago that has no open request, if there are too many; never the newest one."""
        if len(self._uses) > _MAX_USES:
            *older, _ = self._uses.items()
            idle = next((key_id for key_id, use in older if not use.num_running), None)
            if idle is not None:
                del self._uses[idle]
