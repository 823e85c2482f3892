"""Any other HTTP server: `python -m bench.peers.http_server --kind openai --serve "COMMAND" --model NAME`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from bench.peers import driver, http_client
from bench.peers.engine import Events
from bench.peers.http_client import LlamaServer, OpenAIServer, Server
from bench.peers.machine import process_tree
from bench.peers.workload import PeerRequest

_START_LIMIT_S = 600.0


class HttpServer:
    """Server started by the command `--serve`; it answers `/health` when it is ready."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = f"http://127.0.0.1:{arguments.port}"
        self._server: Server = OpenAIServer(url, arguments.served) if arguments.kind == "openai" else LlamaServer(url)
        with open(arguments.log, "wb") as log:
            self._process = subprocess.Popen(shlex.split(arguments.serve), stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + _START_LIMIT_S
        while not _is_ready(f"{url}/health"):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._process.kill()
                raise RuntimeError(f"the server did not start; see {arguments.log}")
            time.sleep(0.5)

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Send all requests; at most `concurrency` streams are open at once."""
        return http_client.run(self._server, requests, concurrency)

    def pids(self) -> list[int]:
        """Return the server's process and its descendants."""
        return process_tree(self._process.pid)

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve", required=True, help="command that serves on --port")
    parser.add_argument("--kind", choices=("openai", "llama"), default="openai")
    parser.add_argument("--served", default="m", help="the model's name in requests")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--log", default="peer-server.log")


if __name__ == "__main__":
    driver.main(HttpServer, "HTTP server", _add_arguments)
