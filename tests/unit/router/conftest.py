"""Every asynchronous test here runs in simulated time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from testkit.router.dispatch_worlds import MakeWorld, World
from testkit.router.simulated_replicas import FakeReplica
from testkit.router.simulated_time import SimulatedLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], SimulatedLoop]]:
    return {"simulated": SimulatedLoop}


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    """Yield a factory of worlds; after the test no poll may have failed, and nothing may wait or run in them."""
    worlds: list[World] = []
    polling: list[asyncio.Task[None]] = []

    def make(*replicas: FakeReplica, is_polled: bool = False, **options: Any) -> World:
        worlds.append(World(*replicas, **options))
        if is_polled:
            polling.append(asyncio.create_task(worlds[-1].dispatcher.run()))
        return worlds[-1]

    yield make
    for task in polling:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for world in worlds:
        world.check_idle()
