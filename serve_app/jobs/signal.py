"""Wakes a loop that waits for something to do."""

from __future__ import annotations

import asyncio
import contextlib


class Signal:
    """Set any number of times before the loop looks, it wakes the loop once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """There is something to do."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return once it was set since the last return, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()
