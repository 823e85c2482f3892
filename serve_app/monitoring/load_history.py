"""Load of the server over the last hour, as one ingress sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replicas.protocol import Band
from router.dispatch import Dispatcher

PERIOD_S = 20.0
NUM_SAMPLES = 180
"""Most samples that are kept: those of an hour."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Load at one time."""

    time_unix_s: float
    tokens_per_s: float
    """Output tokens per second of all replicas."""
    num_running: int
    num_waiting: int
    """Requests in this ingress's queues and in the replicas'."""
    kv_usage: float
    """Share of all replicas' KV blocks that sequences hold, 0 to 1."""


class LoadHistory:
    """Samples of the load, one each `PERIOD_S`.

    Invariants: at most `NUM_SAMPLES` samples, oldest first.
    """

    def __init__(self, dispatcher: Dispatcher, unix_s: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._unix_s = unix_s
        self._samples: deque[LoadSample] = deque(maxlen=NUM_SAMPLES)

    @property
    def samples(self) -> list[LoadSample]:
        """Samples of the last hour, oldest first."""
        return list(self._samples)

    async def run(self) -> None:
        """Take samples until the task is cancelled."""
        while True:
            self.add_sample()
            await asyncio.sleep(PERIOD_S)

    def add_sample(self) -> None:
        """Add a sample of the present load; the oldest one leaves when there are too many."""
        stats = [view.stats for view in self._dispatcher.load()]
        num_blocks = sum(each.num_blocks for each in stats)
        num_free_blocks = sum(each.num_free_blocks for each in stats)
        num_queued = sum(self._dispatcher.waiting(band, 0).num_requests for band in Band)
        self._samples.append(
            LoadSample(
                time_unix_s=round(self._unix_s(), 1),
                tokens_per_s=round(sum(each.generated_tokens_per_s for each in stats), 1),
                num_running=sum(each.num_running for each in stats),
                num_waiting=num_queued + sum(each.num_waiting for each in stats),
                kv_usage=round(1 - num_free_blocks / num_blocks, 4) if num_blocks else 0.0,
            )
        )
