"""Wake-ups of loops that wait for work."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """Event that wakes a loop; set several times before the loop waits, it wakes the loop once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the loop now, or spare it its next wait."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return once it was set since the last return, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()
