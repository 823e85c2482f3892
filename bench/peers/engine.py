"""What the driver asks of an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bench.peers.workload import PeerRequest


class Events(NamedTuple):
    """When each output token came; seconds of `time.perf_counter`."""

    token_s: dict[int, list[float]]
    """By request number: one moment for each token. Tokens that came together have the same moment."""
    started_s: float
    ended_s: float


class PeerEngine(Protocol):
    """An engine with a model loaded."""

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Give the engine all `requests` at once, of which it runs at most `concurrency` together; wait for the end."""
        ...

    def pids(self) -> list[int]:
        """Processes whose memory and processor time are the engine's."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


EngineFactory = Callable[[argparse.Namespace], PeerEngine]
"""Loads `model` in `dtype` with `threads`; other arguments are the engine's own."""
