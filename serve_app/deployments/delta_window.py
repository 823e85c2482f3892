"""Back-pressure of a replica's streams: a delta leaves only once the ingress has taken an earlier one.

Ray Serve 2.60 has none of its own. Its queue between a deployment's generator and the caller has no bound, and neither
has Ray's list of results that the caller has not read. With an ingress slower than its replicas the backlog grew by
thousands of deltas a second. Ray then waits, at the end of a stream, for the caller to acknowledge all of that
backlog, and it waits on the event loop of the replica, which answers no health check until then.

`router.stream_window` bounds Ray's part. `paced` bounds Serve's: Ray pickles a result just before it sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")

_CHECK_PERIOD_S = 1.0


class Parcel(Generic[ValueT]):
    """Value on its way to another process, where it arrives without the parcel. It tells when it is pickled."""

    __slots__ = ("_has_left", "_value")

    def __init__(self, value: ValueT, has_left: Callable[[], object]) -> None:
        """`has_left` is called in the thread that pickles."""
        self._value = value
        self._has_left = has_left

    def __reduce__(self) -> tuple[Any, ...]:
        self._has_left()
        return _arrived, (self._value,)


async def paced(
    values: AsyncGenerator[ValueT, None], check: Callable[[], None], check_period_s: float = _CHECK_PERIOD_S
) -> AsyncGenerator[Parcel[ValueT], None]:
    """Yield the values in parcels; take each value only after the parcel before has been pickled.

    `check` is called before each value and in every period of the wait. It raises to end the stream.
    """
    loop = asyncio.get_running_loop()
    async for value in values:
        check()
        has_left = asyncio.Event()
        yield Parcel(value, partial(loop.call_soon_threadsafe, has_left.set))
        while not has_left.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(check_period_s):
                    await has_left.wait()
            if not has_left.is_set():
                check()


def _arrived(value: ValueT) -> ValueT:
    return value
