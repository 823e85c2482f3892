"""The streams of one request's sequences, read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from replicas.errors import RequestAborted, ServingError
from replicas.protocol import FinishReason, TokenDelta, Usage
from serve_app.openai.reply.fan_in import merge_streams


class Scripted:
    """Stream of `num_deltas` deltas, the last with a finish reason if it `finishes`; then it raises `error`."""

    def __init__(self, num_deltas: int = 3, finishes: bool = True, error: BaseException | None = None) -> None:
        self.num_deltas = num_deltas
        self.finishes = finishes
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[TokenDelta, None]:
        try:
            for start in range(self.num_deltas):
                await self.gate.wait()
                is_last = self.finishes and start == self.num_deltas - 1
                reason = FinishReason.LENGTH if is_last else None
                yield TokenDelta("r", start, (start,), "x", Usage(1, start + 1, 0), finish_reason=reason)
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def read_all(scripted: Sequence[Scripted]) -> None:
    async with merge_streams([each.stream() for each in scripted]) as deltas:
        async for _ in deltas:
            pass


async def test_one_stream_is_read_without_a_task() -> None:
    scripted, num_tasks = Scripted(), len(asyncio.all_tasks())
    async with merge_streams([scripted.stream()]) as deltas:
        seen = [(item.index, item.delta.start, len(asyncio.all_tasks())) async for item in deltas]
    assert seen == [(0, start, num_tasks) for start in range(3)]


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_all_deltas_of_every_stream_come_in_its_order(num_streams: int) -> None:
    scripted = [Scripted(5) for _ in range(num_streams)]
    async with merge_streams([each.stream() for each in scripted]) as deltas:
        seen = [(item.index, item.delta.start) async for item in deltas]
    for index in range(num_streams):
        assert [start for number, start in seen if number == index] == list(range(5))


async def test_a_stream_closes_with_its_last_delta() -> None:
    scripted = Scripted(1)
    async with merge_streams([scripted.stream()]) as deltas:
        assert (await anext(deltas)).delta.finish_reason is FinishReason.LENGTH
        assert scripted.is_closed


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_leaving_closes_every_stream(num_streams: int) -> None:
    scripted = [Scripted(5) for _ in range(num_streams)]
    async with merge_streams([each.stream() for each in scripted]) as deltas:
        await anext(deltas)
    assert all(each.is_closed for each in scripted)


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "ended before the sequence did"), (ServingError("broken"), "broken"), (ValueError("bug"), "bug")],
)
async def test_a_stream_that_fails_or_ends_early_ends_all(
    num_streams: int, error: Exception | None, expected: str
) -> None:
    scripted = [Scripted(2, finishes=False, error=error) for _ in range(num_streams)]
    with pytest.raises(Exception, match=expected):
        await read_all(scripted)
    assert all(each.is_closed for each in scripted)


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_a_stream_cancelled_elsewhere_is_an_aborted_request(num_streams: int) -> None:
    scripted = [Scripted(1, finishes=False, error=asyncio.CancelledError()) for _ in range(num_streams)]
    with pytest.raises(RequestAborted):
        await read_all(scripted)


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_a_cancelled_reader_closes_its_streams(num_streams: int) -> None:
    scripted = [Scripted() for _ in range(num_streams)]
    for each in scripted:
        each.gate.clear()
    reading = asyncio.create_task(read_all(scripted))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert all(each.is_closed for each in scripted)
