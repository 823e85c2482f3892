"""Headway's engine in this process: `python -m bench.peers.headway_engine --model DIR`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench.engine.engines import load_runner, make_engine
from bench.engine.token_times import TimedEngine, Timeline
from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest
from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.model.loading.options import ModelOptions

_MOST_SEQS = 32


class HeadwayEngine(PeerEngine):
    """Engine as in a replica, without HTTP and text: all peers take and give token ids."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        dtype = driver.DTYPES[arguments.dtype]
        model = ModelOptions(
            arguments.model,
            dtype,
            "cpu",
            arguments.max_model_len,
            arguments.threads,
            quantization=arguments.quantization,
        )
        limits = EngineLimits(max_num_seqs=_MOST_SEQS, max_num_batched_tokens=arguments.max_batch_tokens)
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._runner = load_runner(model, limits, arguments.kv_cache_mib, arguments.kv_cache_dtype)

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Add all requests at once; the engine's own queue holds those beyond `concurrency`."""
        tokens = self._max_num_batched_tokens
        return run_engine(make_engine(self._runner, max_num_seqs=concurrency, max_num_batched_tokens=tokens), requests)


def run_engine(engine: Engine, requests: Sequence[PeerRequest]) -> Events:
    """Run all requests to their ends."""
    timed = TimedEngine(engine, Timeline())
    started_s = time.perf_counter()
    token_s = {request.number: timed.add(request.prompt, request.num_output_tokens) for request in requests}
    timed.finish()
    return Events(token_s, started_s, time.perf_counter())


if __name__ == "__main__":
    driver.main(HeadwayEngine, "headway", driver.add_headway_arguments)
