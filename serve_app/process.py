"""Run-time of a process that serves requests: turns of the GIL, garbage collection, and the C heap."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

_SWITCH_INTERVAL_S = 0.0001
_OBJECTS_PER_COLLECTION = 10_000
"""New objects between two garbage collections, instead of Python's 700. A collection of so many takes about 0.2 ms."""
_MMAP_BYTES, _TRIM_BYTES = 2**19, 2**20
_NUM_ARENAS = 2
_TRIM_PERIOD_S = 60.0
# Parameters of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def share_gil() -> None:
    """Let the event loop have the GIL back soon while worker threads parse and render.

    By default a thread that computes in Python keeps the GIL for 5 ms. A request takes a dozen turns of the loop, each
    of which waits for the GIL.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection while a process makes its parts, then exclude all present objects from it.

    Imported modules hold hundreds of thousands of objects. Collections take a fifth of the time of the imports and free
    next to nothing. Later, a full collection would walk over all objects and stop every thread for a tenth of a second.
    From then on collections are rarer than by default: requests leave few cycles.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        gc.enable()


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system when they are freed.

    By default the first large block that is freed raises the size from which blocks have mappings of their own, up to
    32 MiB. Bodies then come from the heaps, one for each thread, which keep what lies below the last block in use. A
    fixed size keeps large blocks apart. It is above the 256 KiB in which bodies arrive: mapping those anew, with a page
    fault for every 4 KiB, would double the time that the event loop takes to receive a body. Other C libraries have no
    such parameters and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def trim_heaps() -> None:
    """Have glibc give the free pages inside its heaps back to the system once a minute, from a thread of its own.

    By itself it gives back only what lies behind the last block in use. Blocks of many sizes and ages then leave ever
    more pages that no block uses. A trim of 350 MiB takes some milliseconds without the GIL.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        threading.Thread(target=_trim, args=(malloc_trim,), name="malloc_trim", daemon=True).start()


def _trim(malloc_trim: Callable[[int], int]) -> None:
    while True:
        time.sleep(_TRIM_PERIOD_S)
        malloc_trim(0)
