"""Memory of a server's processes, by what they are."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter

import psutil

from replicas.model.hardware.limits import unshared_bytes

_TITLE = re.compile(r"ray::ServeReplica:\w+:(\w+)")
"""Begin of the title that Ray gives to the process of a deployment's replica."""
_REST = "Ray and Serve"
_MIB = 2**20


def memory_line(process_id: int | None = None) -> str:
    """Return the memory of a process and its descendants, without mapped files, by deployment: `Model 374 MiB, ...`.

    Several replicas of one deployment are counted: `Model 2 x 374 MiB`. None: this process.
    """
    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    process = psutil.Process(process_id or os.getpid())
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            title = _TITLE.match(" ".join(each.cmdline()))
            name = title[1] if title else _REST
            sizes[name] += unshared_bytes(each) or 0
            numbers[name] += 1
    names = sorted(sizes, key=lambda name: (name == _REST, name))
    parts = [_part(name, sizes[name], 1 if name == _REST else numbers[name]) for name in names]
    return f"{', '.join(parts)}; {sizes.total() / 2**30:.1f} GiB in all"


def _part(name: str, num_bytes: int, number: int) -> str:
    size = f"{num_bytes / number / _MIB:,.0f} MiB"
    return f"{name} {number} x {size}" if number > 1 else f"{name} {size}"
