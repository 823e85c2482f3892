"""Every asynchronous test here runs in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from testkit.router.simulated_time import SimulatedLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], SimulatedLoop]]:
    return {"simulated": SimulatedLoop}
