"""Live feed of snapshots as server-sent events: each one is built once for all viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from pydantic_core import to_json

from replicas.errors import Overloaded
from serve_app.openai.reply.format import JsonObject

logger = logging.getLogger(__name__)


class LiveFeed:
    """Feed of snapshots, one a period. A viewer that reads slowly misses some; without viewers none is built.

    Invariants: at most `max_viewers` viewers; snapshots are built if and only if there is a viewer.
    """

    def __init__(
        self, build: Callable[[], Awaitable[JsonObject]], is_open: Callable[[], bool], period_s: float = 1.0,
        max_viewers: int = 16,
    ) -> None:  # fmt: skip
        """Create the feed; it ends for all viewers within a period once `is_open` is false."""
        self._build = build
        self._is_open = is_open
        self._period_s = period_s
        self._max_viewers = max_viewers
        self._next: asyncio.Future[bytes] | None = None
        self._building: asyncio.Task[None] | None = None
        self.num_viewers = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the snapshots as events.

        Raises:
            Overloaded: there are too many viewers.
        """
        if self.num_viewers >= self._max_viewers:
            message = f"{self.num_viewers} viewers watch; the limit is {self._max_viewers}"
            raise Overloaded(message, reason="max_dashboard_viewers")
        self.num_viewers += 1
        if self._building is None:
            self._next = asyncio.get_running_loop().create_future()
            self._building = asyncio.create_task(self._run())
        try:
            while self._is_open() and self._next is not None:
                yield await asyncio.shield(self._next)
        finally:
            self.num_viewers -= 1
            if self.num_viewers == 0:
                self._building.cancel()
                self._building = None

    async def _run(self) -> None:
        while True:
            event = b": no news\n\n"
            try:
                event = b"data: " + to_json(await self._build(), inf_nan_mode="null") + b"\n\n"
            except Exception:  # the next snapshot may be possible
                logger.exception("the dashboard's snapshot cannot be built")
            shown, self._next = self._next, asyncio.get_running_loop().create_future()
            if shown is not None:
                shown.set_result(event)
            await asyncio.sleep(self._period_s)
