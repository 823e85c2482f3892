"""Redis server for Ray's gcs, whose state then survives its death."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testkit.free_port import free_port
from testkit.serving.served import wait_for

_HOST, _END_LIMIT_S = "127.0.0.1", 10.0


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server that keeps its data in memory; yield the environment in which Ray uses it.

    Raises:
        FileNotFoundError: there is no `redis-server` on the path.
    """
    program, port = shutil.which("redis-server"), free_port(_HOST)
    if program is None:
        raise FileNotFoundError("redis-server is not installed; --redis needs it")
    command = [program, "--port", str(port), "--bind", _HOST, "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _listens(port), "redis-server listens")
            yield {"RAY_REDIS_ADDRESS": f"{_HOST}:{port}"}
        finally:
            process.terminate()
            process.wait(_END_LIMIT_S)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 1.0):
        return True
    return False
