"""A simulated clock, and an event loop that advances the clock instead of waiting."""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass

UNIX_OFFSET_S = 1e6


@dataclass
class FakeClock:
    """Monotonic clock in seconds; `unix` is the same moment as unix time."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now + UNIX_OFFSET_S


class _SkippingSelector(selectors.DefaultSelector):
    """Selector that advances the clock instead of waiting; it fails if there is nothing to wait for."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that will never happen"
            self._clock.now += max(0.0, timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop on a `FakeClock`: a sleep of an hour returns at once, with the clock an hour later."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(_SkippingSelector(self.clock))

    def time(self) -> float:
        return self.clock.now


def simulated_clock() -> FakeClock:
    """Return the clock of the running simulated loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop.clock


async def settle_down(rounds: int = 20) -> None:
    """Let all tasks run that are ready, without time passing."""
    for _ in range(rounds):
        await asyncio.sleep(0)
