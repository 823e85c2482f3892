"""Thread of an engine: it loads the model and then runs the engine's steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class EngineThread:
    """Thread that runs functions one after the other, and ends with the last of them or with the process.

    CUDA graphs and the workspaces of libraries belong to the thread that made them, so the thread that captures graphs
    replays them too.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` in the thread, and return its result or raise its error."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._put(run)
        return future.result()

    def run_last(self, function: Callable[[], None]) -> None:
        """Let the thread run `function`, which raises nothing, and end. Returns at once; no task may follow."""
        self._put(function)
        self.end()

    def end(self) -> None:
        """Let the thread end after its tasks. Returns at once; called once."""
        self._put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _put(self, task: Callable[[], None] | None) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
