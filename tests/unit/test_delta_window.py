"""Back-pressure of a replica's streams: nothing is taken from the engine before the ingress has taken what left."""

import asyncio
import pickle
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray import cloudpickle

from replicas.errors import ReplicaLost
from router.stream_window import MAX_UNREAD, with_window
from serve_app.deployments.delta_window import paced
from testkit.limits import LIMIT_S


class Numbers:
    """Numbers from 0, with the count of those that were taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    async def stream(self, end: int) -> AsyncGenerator[int, None]:
        while self.num_taken < end:
            self.num_taken += 1
            yield self.num_taken - 1


async def test_a_value_is_taken_only_after_the_one_before_has_left() -> None:
    numbers = Numbers()
    stream = paced(numbers.stream(3), lambda: None)
    following = asyncio.ensure_future(anext(stream))
    for number in range(3):
        parcel = await following
        following = asyncio.ensure_future(anext(stream))
        for _ in range(10):
            await asyncio.sleep(0)
        assert numbers.num_taken == number + 1 and not following.done()
        # Ray pickles in another thread.
        assert pickle.loads(await asyncio.to_thread(cloudpickle.dumps, parcel)) == number
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(following, LIMIT_S)


async def test_a_reader_that_is_lost_ends_the_wait() -> None:
    is_lost = False

    def check() -> None:
        if is_lost:
            raise ReplicaLost("the ingress is lost", has_died=False)

    numbers = Numbers()
    stream = paced(numbers.stream(3), check, check_period_s=0.01)
    await anext(stream)
    is_lost = True
    with pytest.raises(ReplicaLost):
        await asyncio.wait_for(anext(stream), LIMIT_S)
    assert numbers.num_taken == 1


class RecordedActor:
    """Actor's handle that records the options of its methods."""

    def __init__(self) -> None:
        self.options_of: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def options(self, **options: Any) -> "Method":
                actor.options_of[name] = options
                return self

        return Method()


class Replica:
    """Replica of Serve's router, as far as `with_window` knows it."""

    def __init__(self, actor: RecordedActor) -> None:
        self._actor_replica_wrapper = Sender(actor)


class Sender:
    def __init__(self, actor: RecordedActor) -> None:
        self._actor_handle = actor


def test_streams_of_a_replica_pause_at_the_window() -> None:
    actor = RecordedActor()
    handle = with_window(Replica(actor))._actor_replica_wrapper._actor_handle
    for name in ("handle_request_streaming", "handle_request_with_rejection", "handle_request"):
        getattr(handle, name).options(num_returns="streaming")
    window = {"num_returns": "streaming", "_generator_backpressure_num_objects": MAX_UNREAD}
    assert actor.options_of == {
        "handle_request_streaming": window,
        "handle_request_with_rejection": window,
        "handle_request": {"num_returns": "streaming"},
    }
