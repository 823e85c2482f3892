"""Cancellation of a request by another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from replicas.errors import RequestAborted


class Cancellation:
    """Cancellation of a request's work, which `within` interrupts; it is used on one event loop."""

    def __init__(self) -> None:
        self.is_requested = False
        self._limit: asyncio.Timeout | None = None

    def request(self) -> None:
        """Interrupt the work now; work that begins later is interrupted at once."""
        self.is_requested = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Run work that may be interrupted; one at a time.

        Raises:
            RequestAborted: the work was interrupted.
        """
        try:
            async with asyncio.timeout(0 if self.is_requested else None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise RequestAborted("the request was cancelled") from None
        finally:
            self._limit = None
