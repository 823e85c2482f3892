"""Requests leave at their times, or whenever another one has ended."""

import asyncio
from dataclasses import dataclass, field

import pytest

from serve_app.benchmark.rows import Row
from serve_app.benchmark.sender import ScheduledRequest, send_on_time, send_together
from testkit.limits import LIMIT_S


@dataclass
class GatedClient:
    """Client whose requests end when the gate opens."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    most_open: int = 0
    bug: Exception | None = None

    async def run(self, body: bytes, row: Row) -> None:
        row.sent_s = clock()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.bug is not None:
                raise self.bug
            await self.gate.wait()
        finally:
            self.num_open -= 1
            row.end_s = clock()


def clock() -> float:
    return asyncio.get_running_loop().time()


def requests(*times_s: float) -> list[ScheduledRequest]:
    started_s = clock()
    return [ScheduledRequest(Row(index, 1, 1, started_s + at_s), b"") for index, at_s in enumerate(times_s)]


async def test_requests_leave_while_earlier_ones_are_open() -> None:
    client, scheduled = GatedClient(), requests(0.0, 0.01, 0.02)
    sending = asyncio.create_task(send_on_time(client, clock, scheduled))
    async with asyncio.timeout(LIMIT_S):
        while client.num_open < 3:
            await asyncio.sleep(0.001)
        client.gate.set()
        await sending
    assert all(request.row.lateness_s >= 0 for request in scheduled)
    assert not any(request.row.is_cut_off for request in scheduled)


async def test_a_fixed_number_is_open_and_all_are_sent() -> None:
    client, scheduled = GatedClient(), requests(*[0.0] * 7)
    sending = asyncio.create_task(send_together(client, clock, scheduled, 3))
    async with asyncio.timeout(LIMIT_S):
        while client.num_open < 3:
            await asyncio.sleep(0.001)
        client.gate.set()
        await sending
    assert client.most_open == 3
    assert all(request.row.end_s is not None for request in scheduled)


async def test_no_request_starts_after_the_end() -> None:
    client, scheduled = GatedClient(), requests(0.0, 0.0)
    client.gate.set()
    await send_together(client, clock, scheduled, 1, end_s=clock() - 1)
    assert [request.row.sent_s for request in scheduled] == [None, None]


@pytest.mark.parametrize("together", [False, True])
async def test_a_cancelled_run_cuts_open_requests_off(together: bool) -> None:
    client, scheduled = GatedClient(), requests(0.0, 0.0, 600.0)
    coroutine = send_together(client, clock, scheduled, 2) if together else send_on_time(client, clock, scheduled)
    sending = asyncio.create_task(coroutine)
    async with asyncio.timeout(LIMIT_S):
        while client.num_open < 2:
            await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert [request.row.is_cut_off for request in scheduled] == [True, True, False]
    assert client.num_open == 0 and scheduled[2].row.sent_s is None


async def test_a_bug_ends_the_run() -> None:
    client = GatedClient(bug=KeyError("oops"))
    with pytest.raises(KeyError):
        await send_together(client, clock, requests(0.0), 1)
