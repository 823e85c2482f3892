"""Wake-up event for loops that wait for work."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """Event that wakes one loop; several calls of `set` before the loop waits wake it once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the loop, or make its next wait return at once."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until `set` is called, or was called since the last wait, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()
