"""Watcher that polls a served application while a load runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of one look."""

    at_unix_s: float
    """Time at which the look began."""
    value: Any


class Watch:
    """Looks so far; the watching thread appends, others read."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.num_failed = 0


@contextlib.contextmanager
def watching(look: Callable[[], Any], period_s: float) -> Iterator[Watch]:
    """Look every `period_s` within the context; count failed looks and leave them out."""
    watch, stop = Watch(), threading.Event()

    def run() -> None:
        while not stop.wait(period_s):
            at_unix_s = time.time()
            try:
                watch.seen.append(Seen(at_unix_s, look()))
            except (httpx.HTTPError, KeyError, ValueError):
                watch.num_failed += 1

    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
