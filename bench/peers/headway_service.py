"""Headway's whole service, over HTTP: `python -m bench.peers.headway_service --model DIR`.

A private Ray cluster with one ingress and one replica, by default behind HAProxy with Serve's throughput flags.
"""

from __future__ import annotations

import argparse
import contextlib

from bench.peers import driver
from bench.peers.http_server import HttpEngine, OpenAIServer
from bench.serving import REAL, serving

_MODEL_NAME = "peer"


def start(arguments: argparse.Namespace) -> HttpEngine:
    """Start the application."""
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
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "quantization": arguments.quantization,
        "enable_prefix_caching": "false",
        "max_wait_s": "standard=none",
    }
    stack = contextlib.ExitStack()
    served = stack.enter_context(serving(REAL, settings, arguments.profile == "throughput"))
    return HttpEngine(OpenAIServer(f"{served.url}/v1/completions", _MODEL_NAME), served.process.pid, stack.close)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the service."""
    parser.add_argument("--profile", choices=("throughput", "default"), default="throughput")
    driver.add_headway_arguments(parser)


if __name__ == "__main__":
    driver.main(start, "headway over HTTP", add_arguments)
