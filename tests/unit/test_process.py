"""The C heap of a process that serves requests."""

import subprocess
import sys

import pytest

GROWTH = """
import ctypes, os, sys
from serve_app.process import return_freed_memory

PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE

def body(size):
    block = LIBC.malloc(size)
    ctypes.memset(block, 1, size)
    return block

if sys.argv[1] == "bounded":
    return_freed_memory()
LIBC.free(body(9 * 2**20))
before = rss()
bodies = [(body(8 * 2**20), body(100_000)) for _ in range(8)]
for large, small in bodies:
    LIBC.free(large)
print(rss() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C heap is glibc's")
def test_freed_bodies_leave_the_process() -> None:
    """Return to the system what a small block above would keep in glibc's heap."""
    grown = {
        name: int(
            subprocess.run([sys.executable, "-c", GROWTH, name], capture_output=True, check=True, text=True).stdout
        )
        for name in ("default", "bounded")
    }
    assert grown["default"] > 30 * 2**20
    assert grown["bounded"] < 2**20


GAPS = """
import sys, time
from serve_app import process

PAGE = 4096
exec(sys.argv[1])

blocks = [body(3000) for _ in range(30_000)]
for block in blocks[::2] + blocks[1:-1:2]:
    LIBC.free(block)
before = rss()
process._TRIM_PERIOD_S = 0.1
process.trim_heaps()
deadline_s = time.monotonic() + 30
while rss() > before - 60 * 2**20 and time.monotonic() < deadline_s:
    time.sleep(0.1)
print(before - rss())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C heap is glibc's")
def test_free_pages_below_a_block_in_use_leave_the_process() -> None:
    """Return to the system what a small block at the end of glibc's heap would keep."""
    helpers = GROWTH[: GROWTH.index("if sys.argv")]
    run = subprocess.run([sys.executable, "-c", GAPS, helpers], capture_output=True, check=True, text=True)
    assert int(run.stdout) > 60 * 2**20
