"""Looks at a served application again and again while a load runs."""

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
    """What one look showed."""

    at_unix_s: float
    """When the look began."""
    value: Any


class Watch:
    """The looks so far; appended to by the watching thread, read by others."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.num_failed = 0


@contextlib.contextmanager
def watching(look: Callable[[], Any], period_s: float) -> Iterator[Watch]:
    """Look every `period_s` for as long as the context lasts; a look that fails is counted and left out."""
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
