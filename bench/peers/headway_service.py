"""Headway's whole service, over HTTP: `python -m bench.peers.headway_service --model DIR`.

A private Ray cluster with one ingress and one replica, by default behind HAProxy with Serve's throughput flags.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from bench.peers import driver, http_client
from bench.peers.engine import Events
from bench.peers.http_client import OpenAIServer
from bench.peers.machine import process_tree
from bench.peers.workload import PeerRequest
from bench.serving import REAL, serving

_MODEL_NAME = "peer"


class HeadwayService:
    """The application, and a client that keeps at most `concurrency` streams open."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        settings: dict[str, object] = {
            "model": arguments.model,
            "served_model_name": _MODEL_NAME,
            "device": "cpu",
            "dtype": driver.DTYPES[arguments.dtype],
            "num_threads": arguments.threads,
            "max_num_seqs": max(arguments.conc, *(int(batch) for batch in arguments.batches.split(","))),
            "max_num_batched_tokens": arguments.max_batch_tokens,
            "max_model_len": arguments.max_model_len,
            "kv_cache_bytes": f"{arguments.kv_cache_mib}MiB",
            "enable_prefix_caching": "false",
            "max_standard_wait_s": "none",
        }
        with contextlib.ExitStack() as stack:
            served = stack.enter_context(serving(REAL, settings, arguments.profile == "throughput"))
            self._server = OpenAIServer(served.url, _MODEL_NAME)
            self._pid = served.process.pid
            self._open = stack.pop_all()

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Send all requests; at most `concurrency` streams are open at once."""
        return http_client.run(self._server, requests, concurrency)

    def pids(self) -> list[int]:
        """Return every process of the served application, Ray's included; not this process, the client."""
        return process_tree(self._pid)

    def close(self) -> None:
        """Stop the application and its cluster."""
        self._open.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the service."""
    parser.add_argument("--profile", choices=("throughput", "default"), default="throughput")
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-mib", type=int, default=1024)


if __name__ == "__main__":
    driver.main(HeadwayService, "headway over HTTP", add_arguments)
