"""Processor time of all that shows what the service does: `python -m bench.face_cost`.

200 streams over two timed replicas go on all the time. By turns, metrics at Ray, the registry of requests, the parts of
their time and a viewer of the dashboard are on and off (`bench.face_app`). The figure is the processor time of all
processes of the service, those of Ray included, for 1,000 output tokens. A timed replica computes nothing, so a real
model makes the share smaller. Its tokens come so slowly that two cores carry them: beyond that deltas merge, and the
processor time of a token changes with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.record import write
from bench.serving import serving
from serve_app.config import DEMO_MODEL_NAME
from testkit.serving.served import Served

NAME, MAX_RATIO = "face_cost", 1.02
_APP = "bench.face_app:build"
_NUM_STREAMS = 200
_MAX_TOKENS = 400
_SETTLE_S = 2.0
"""Time after a turn of the switch that is not measured: the processes look for it, and Ray reports what it has."""
_WARM_UP_S = 15.0
_SETTINGS: dict[str, object] = {
    "num_replicas": 2, "max_num_seqs": 128, "step_times": "slow-gpu-70b", "cpus_per_replica": 0.01,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of a span in which the switch did not turn."""

    is_on: bool
    cpu_s: float
    num_tokens: float
    wall_s: float

    @property
    def cpu_ms_per_1000_tokens(self) -> float:
        """Processor time for 1,000 output tokens, milliseconds."""
        return 1e6 * self.cpu_s / self.num_tokens


def cpu_s(served: Served) -> float:
    """Return the processor time that the service's processes have used."""
    total = 0.0
    for process in (psutil.Process(served.process.pid), *served.descendants()):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def _stream(http: aiohttp.ClientSession, number: int) -> None:
    """Read streamed chats of unequal lengths to their ends, one after the other: ends in waves would hit some turns."""
    rng = random.Random(number)
    while True:
        messages = [{"role": "user", "content": f"{number}: tell me about the quick brown fox"}]
        body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": rng.randrange(2, _MAX_TOKENS)}
        async with http.post("/v1/chat/completions", json=body | {"stream": True, "ignore_eos": True}) as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content.iter_any():
                pass


async def _view(http: aiohttp.ClientSession) -> None:
    async with http.get("/dashboard/events") as events:
        async for _ in events.content.iter_any():
            pass


@contextlib.asynccontextmanager
async def _running(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _turn(switch: Path, is_on: bool) -> None:
    if is_on:
        switch.unlink(missing_ok=True)
    else:
        switch.touch()


async def _measure(served: Served, is_on: bool, seconds: float) -> Window:
    await asyncio.sleep(_SETTLE_S)
    begin_s, cpu_before_s = time.monotonic(), cpu_s(served)
    before = await asyncio.to_thread(served.metric, "vllm:generation_tokens_total")
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(served.metric, "vllm:generation_tokens_total")
    return Window(is_on, cpu_s(served) - cpu_before_s, after - before, time.monotonic() - begin_s)


async def run(served: Served, switch: Path, num_turns: int, seconds: float) -> list[Window]:
    """Return the windows, in pairs of one with and one without; the order within a pair changes each time."""
    windows = []
    limits = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(served.url, timeout=limits, connector=connector) as http,
        _running(*(_stream(http, number) for number in range(_NUM_STREAMS))),
    ):
        await asyncio.sleep(_WARM_UP_S)
        for turn in range(num_turns):
            for is_on in (True, False) if turn % 2 == 0 else (False, True):
                await asyncio.to_thread(_turn, switch, is_on)
                async with _running(*([_view(http)] if is_on else [])):
                    windows.append(await _measure(served, is_on, seconds))
                print(asdict(windows[-1]), f"{windows[-1].cpu_ms_per_1000_tokens:.1f} ms", flush=True)
    return windows


def figures_of(windows: list[Window]) -> dict[str, Any]:
    """Return the medians of each state, and the median of the pairs' ratios."""
    pairs = [
        (one, other) if one.is_on else (other, one) for one, other in zip(windows[::2], windows[1::2], strict=True)
    ]
    ratios = [on.cpu_ms_per_1000_tokens / off.cpu_ms_per_1000_tokens for on, off in pairs]
    return {
        "num_streams": _NUM_STREAMS,
        "on_cpu_ms_per_1000_tokens": statistics.median(on.cpu_ms_per_1000_tokens for on, _ in pairs),
        "off_cpu_ms_per_1000_tokens": statistics.median(off.cpu_ms_per_1000_tokens for _, off in pairs),
        "cpu_ratio": statistics.median(ratios),
        "ratios": ratios,
        "windows": [asdict(window) for window in windows],
    }


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each span")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "off"
        with serving(_APP, {**_SETTINGS, "switch": switch}) as served:
            figures = figures_of(asyncio.run(run(served, switch, options.turns, options.seconds)))
    on, off = figures["on_cpu_ms_per_1000_tokens"], figures["off_cpu_ms_per_1000_tokens"]
    print(f"processor time for 1,000 tokens: {on:.1f} ms on, {off:.1f} ms off: {figures['cpu_ratio']:.3f}")
    print(write(NAME, figures), file=sys.stderr)
    return 0 if figures["cpu_ratio"] <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
