"""Cache of what was used last, bounded by its bytes; threads may share it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class BoundedCache(Generic[KeyT, ValueT]):
    """Cache of values by keys, of which those used last are kept.

    Invariant: the sizes of the values add up to `num_bytes`, at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value of a key; None: it is not known."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self.num_hits += 1
            return entry[0]

    def put(self, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Add a value of a size, key included; one that is larger than the cache is left out."""
        with self._lock:
            if key in self._entries or num_bytes > self._max_bytes:
                return
            self._entries[key] = value, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed

    def check_invariants(self) -> None:
        """Fail if an invariant does not hold."""
        assert self.num_bytes == sum(size for _, size in self._entries.values()) <= self._max_bytes
