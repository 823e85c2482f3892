"""Receivers of webhooks: the attempts under way at each, and the pauses of those that do not answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

KeyT = TypeVar("KeyT")

_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 60.0
_MAX_SILENT = 4096
"""Most receivers whose silence is remembered. Beyond it the one whose pause ends first is forgotten."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """Host that receives one tenant's webhooks; the same host is another receiver for each tenant."""

    tenant: str
    host: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Receivers, tenants and deliveries that get no further attempt now."""

    receivers: frozenset[Receiver] = frozenset()
    tenants: frozenset[str] = frozenset()
    delivery_ids: frozenset[str] = frozenset()
    """Deliveries with an attempt under way here. One that was taken from this worker still looks due."""


NONE_CLOSED = Closed()


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Most attempts under way at the same time."""

    per_receiver: int = 4
    per_tenant: int = 16


@dataclass(frozen=True, slots=True)
class _Silence:
    """Series of attempts without an answer."""

    until_s: float
    """End of the pause, monotonic seconds."""
    pause_s: float


class Receivers:
    """Attempts under way by receiver and tenant, and the receivers that have not answered.

    1. A receiver has at most `per_receiver` attempts under way, a tenant at most `per_tenant`.
    2. After an attempt without an answer a receiver pauses for 5 s, and twice as long after each further one, up to
       a minute. Then it gets one attempt at a time.
    3. An answer of any status ends that.

    Invariants: the counts are those of the attempts between `begin` and `end`; a count of 0 is not kept.
    """

    def __init__(self, limits: ReceiverLimits, monotonic: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic = monotonic
        self._by_receiver: Counter[Receiver] = Counter()
        self._by_tenant: Counter[str] = Counter()
        self._silent: dict[Receiver, _Silence] = {}

    def begin(self, receiver: Receiver) -> bool:
        """Count an attempt that begins, and return True; False: it may not begin now."""
        if not self._may_begin(receiver):
            return False
        self._by_receiver[receiver] += 1
        self._by_tenant[receiver.tenant] += 1
        return True

    def end(self, receiver: Receiver, has_answered: bool) -> None:
        """Count an attempt as ended."""
        self.give_up(receiver)
        if has_answered:
            self._silent.pop(receiver, None)
        else:
            self._note_silence(receiver)

    def give_up(self, receiver: Receiver) -> None:
        """Uncount an attempt that was begun but not made."""
        _subtract(self._by_receiver, receiver)
        _subtract(self._by_tenant, receiver.tenant)

    def closed(self) -> Closed:
        """Return the receivers and tenants for which `begin` would return False."""
        known = {*self._by_receiver, *self._silent}
        full = (tenant for tenant, number in self._by_tenant.items() if number >= self._limits.per_tenant)
        return Closed(frozenset(one for one in known if self._is_closed(one)), frozenset(full))

    def check_invariants(self) -> None:
        """Check the invariants, for tests."""
        assert all(number > 0 for number in (*self._by_receiver.values(), *self._by_tenant.values()))
        assert sum(self._by_receiver.values()) == sum(self._by_tenant.values())
        assert len(self._silent) <= _MAX_SILENT

    def _may_begin(self, receiver: Receiver) -> bool:
        return self._by_tenant[receiver.tenant] < self._limits.per_tenant and not self._is_closed(receiver)

    def _is_closed(self, receiver: Receiver) -> bool:
        silence, number = self._silent.get(receiver), self._by_receiver[receiver]
        if silence is None:
            return number >= self._limits.per_receiver
        return number > 0 or self._monotonic() < silence.until_s

    def _note_silence(self, receiver: Receiver) -> None:
        """Begin a pause; attempts that were under way together count once."""
        now_s, known = self._monotonic(), self._silent.get(receiver)
        if known is not None and now_s < known.until_s:
            return
        pause_s = _FIRST_PAUSE_S if known is None else min(_MAX_PAUSE_S, 2 * known.pause_s)
        self._silent[receiver] = _Silence(now_s + pause_s, pause_s)
        if len(self._silent) > _MAX_SILENT:
            del self._silent[min(self._silent, key=lambda one: self._silent[one].until_s)]


def _subtract(counts: Counter[KeyT], key: KeyT) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
