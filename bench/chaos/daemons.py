"""Deaths of Ray's own daemons under `headway serve`: the server ends, and is started again as systemd would do it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.chaos.load import Load, longest_gap_s
from bench.chaos.receivers import Receivers
from testkit.free_port import free_port
from testkit.limits import LIMIT_S
from testkit.serving.served import Served, serving, wait_for

DAEMONS = ("gcs_server", "raylet")
_ARGUMENTS = "kv_cache_bytes=128MiB dtype=float32 max_num_seqs=8 webhook_allowed_hosts=127.0.0.1"
_RESTART_S, _QUIET_S = 5.0, 3.0
"""`RestartSec` of the unit in docs/operating.md; time for which the load runs on."""


class Restarted:
    """Server on one port and one data folder, which is started again when it has ended."""

    def __init__(self, home: Path, checkpoint: Path, receivers: Receivers) -> None:
        self._home, self._receivers = home, receivers
        self._variables = (f"MODEL={checkpoint}", f"ARGS={_ARGUMENTS}")
        self._port = free_port("127.0.0.1")
        self._stack = contextlib.ExitStack()
        self._app: Served | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run the server; yield its address."""
        with self._stack:
            yield self._start().url

    def kill(self, daemon: str, load: Load) -> dict[str, Any]:
        """Kill a daemon, wait for the server's end, start it again; return what the clients saw in the meantime."""
        assert self._app is not None
        load.submit_batch()
        marks, begin_s = load.seen.marks(), time.monotonic()
        [process] = [child for child in self._app.descendants() if child.name() == daemon]
        process.kill()
        status = self._app.process.wait(LIMIT_S)
        ended_s = time.monotonic()
        time.sleep(_RESTART_S)
        self._start()
        served = len(load.seen.served_s)
        wait_for(lambda: len(load.seen.served_s) > served, "requests are served again")
        whole_s = time.monotonic()
        time.sleep(_QUIET_S)
        end_s = time.monotonic()
        return {
            "fault": f"kill -9: {daemon} of headway serve",
            "exit_status": status,
            "ended_after_s": ended_s - begin_s,
            "whole_after_s": whole_s - begin_s,
            "longest_without_an_answer_s": longest_gap_s(load.seen.served_s, begin_s, end_s),
            "longest_without_an_accepted_job_s": longest_gap_s(load.seen.accepted_s, begin_s, end_s),
            "longest_without_a_webhook_s": longest_gap_s(self._receivers.received_s, begin_s, end_s),
            **load.seen.since(marks),
        }

    def _start(self) -> Served:
        self._app = self._stack.enter_context(serving(self._home, *self._variables, port=self._port))
        return self._app
