"""Trace of the product's calls in one process, for `bench.files_crossed`.

That program puts this file into a served application's path as `sitecustomize`. Each worker of Ray imports it when it
starts. The application may be that of another checkout, so this file imports the standard library alone.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

CHECKOUT_VARIABLE = "HEADWAY_TRACED_CHECKOUT"
"""Environment variable with the directory of the code that is traced."""
OFF = 0
INBOUND, COMPUTING, OUTBOUND = range(3)
"""Parts of a request: to `Scheduler.add`, to the return of the runner's `collect`, and to the end of the answer."""
_PACKAGES = ("serve_app/", "router/", "replicas/")
_RUNNER = "replicas/model/"


class Switch:
    """Two bytes that all processes share: the number of the span that is traced, or `OFF`, and the request's part."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes((OFF, INBOUND)))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2)

    @property
    def span(self) -> int:
        """Number of the span, or `OFF`."""
        return self._bytes[0]

    @property
    def part(self) -> int:
        """Part of the request."""
        return self._bytes[1]

    def begin(self, span: int) -> None:
        """Begin a span, in the first part of a request."""
        self.reach(INBOUND)
        self._bytes[0] = span

    def reach(self, part: int) -> None:
        """Begin a part of the request."""
        self._bytes[1] = part

    def end(self) -> None:
        """End the span."""
        self._bytes[0] = OFF


@dataclass(frozen=True, slots=True)
class Call:
    """First call of a function by another one, in one process, in a part of a span."""

    span: int
    part: int
    at_ns: int
    """Monotonic time, which all processes of a machine share."""
    caller: str
    """File and name of the calling function."""
    file: str
    """File of the called function, relative to the checkout."""
    function: str


class Tracer:
    """Profile function that appends the calls of the product's functions to a file of JSON lines.

    It does so while the switch is on. Ray kills its processes, so that no exit hook is sure to run in them: each line
    is written at once.
    """

    def __init__(self, folder: Path, checkout: str) -> None:
        self._switch = Switch(folder / "switch")
        self._root = f"{checkout}/"
        self._noted: set[tuple[int, int, CodeType | None, CodeType]] = set()
        self._descriptor = os.open(folder / f"{os.getpid()}.calls", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call; the signature is that of `sys.setprofile`."""
        if self._switch.span == OFF:
            return
        # The bodies of modules and classes are not optimized. They run at import.
        if event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:
            self._note(frame)
        elif event == "return" and self._switch.part == COMPUTING and self._is_collect(frame):
            self._switch.reach(OUTBOUND)

    def _note(self, frame: FrameType) -> None:
        file = self._file_of(frame)
        if not file.startswith(_PACKAGES):
            return
        span, part, code = self._switch.span, self._switch.part, frame.f_code
        caller = None if frame.f_back is None else frame.f_back.f_code
        if (span, part, caller, code) in self._noted:
            return
        self._noted.add((span, part, caller, code))
        origin = "thread" if caller is None else f"{caller.co_filename}:{caller.co_qualname}"
        call = Call(span, part, time.monotonic_ns(), origin, file, code.co_qualname)
        os.write(self._descriptor, f"{json.dumps(asdict(call))}\n".encode())
        if part == INBOUND and code.co_qualname == "Scheduler.add":
            self._switch.reach(COMPUTING)

    def _is_collect(self, frame: FrameType) -> bool:
        return frame.f_code.co_name == "collect" and self._file_of(frame).startswith(_RUNNER)

    def _file_of(self, frame: FrameType) -> str:
        """Return the file of a function's module: a dataclass's generated functions have no file of their own."""
        return str(frame.f_globals.get("__file__")).removeprefix(self._root)


def start() -> None:
    """Trace this process from now on, in all threads, if it is a worker of Ray."""
    if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
        tracer = Tracer(Path(__file__).parent, os.environ[CHECKOUT_VARIABLE])
        threading.setprofile(tracer)
        sys.setprofile(tracer)


if __name__ == "sitecustomize":
    start()
