"""Waits in tests and their limits, which are generous: tests check that something happens, at any speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 300.0
"""Limit in seconds for an answer or a change of state."""
START_LIMIT_S = 900.0
"""Limit in seconds for starting an application: imports, a Ray cluster, the first compilation of kernels."""


async def until(is_true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return once `is_true`; fail after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not is_true():
            await asyncio.sleep(0.002)
