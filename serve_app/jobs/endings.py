"""Who waits for a batch to end hears of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

_RECHECK_S = 2.0
"""Another process on the same database may end a batch without a word here."""


class Endings:
    """Wakes those who wait for batches that this process ends."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def ended(self, batch_id: str) -> None:
        """Wake everybody who waits for the batch."""
        for event in self._waiting.get(batch_id, ()):
            event.set()

    @contextmanager
    def watch(self, batch_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the batch ends from now on."""
        event = asyncio.Event()
        self._waiting.setdefault(batch_id, set()).add(event)
        try:
            yield event
        finally:
            events = self._waiting[batch_id]
            events.discard(event)
            if not events:
                del self._waiting[batch_id]

    @staticmethod
    async def look_again(event: asyncio.Event, timeout_s: float) -> None:
        """Return when it is worth asking the database again, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(min(timeout_s, _RECHECK_S)):
                await event.wait()
        except TimeoutError:
            return
