"""Headway's engine in this process: `python -m bench.peers.headway_engine --model DIR`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from bench.peers import driver
from bench.peers.engine import Events
from bench.peers.workload import PeerRequest
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams

_MOST_SEQS = 32


class HeadwayEngine:
    """The engine as in a replica, without HTTP and text: all peers take and give token ids."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._max_num_batched_tokens: int = arguments.max_batch_tokens
        dtype = driver.DTYPES[arguments.dtype]
        loaded = load_model(ModelOptions(arguments.model, dtype, "cpu", arguments.max_model_len, arguments.threads))
        limits = EngineLimits(max_num_seqs=_MOST_SEQS, max_num_batched_tokens=self._max_num_batched_tokens)
        options = RunnerOptions(kv_cache_bytes=arguments.kv_cache_mib * 2**20)
        self._max_model_len = loaded.max_model_len
        self._runner = build_runner(loaded, limits, options)
        warm_up(self._runner, limits)

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Add all requests at once; the engine's own queue holds those beyond `concurrency`."""
        engine = self._engine(concurrency)
        token_s: dict[int, list[float]] = {request.number: [] for request in requests}
        started_s = time.perf_counter()
        for request in requests:
            engine.add(_generate_request(request))
        while engine.has_work:
            deltas = engine.step()
            now = time.perf_counter()
            for delta in deltas:
                assert delta.error is None, delta.error
                token_s[int(delta.request_id)] += [now] * len(delta.token_ids)
        return Events(token_s, started_s, time.perf_counter())

    def pids(self) -> list[int]:
        """Return this process."""
        return [os.getpid()]

    def close(self) -> None:
        """Do nothing: the engine lives in this process."""

    def _engine(self, concurrency: int) -> Engine:
        config = EngineConfig(
            num_blocks=self._runner.num_blocks,
            max_model_len=self._max_model_len,
            max_num_seqs=concurrency,
            max_num_batched_tokens=self._max_num_batched_tokens,
            enable_prefix_caching=False,
        )
        return Engine(config, self._runner, lambda _: SilentDecoder(), ReplicaIdentity("bench", "bench", os.getpid()))


def _generate_request(request: PeerRequest) -> GenerateRequest:
    params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(str(request.number), request.prompt, params)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this engine."""
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-mib", type=int, default=1024)


if __name__ == "__main__":
    driver.main(HeadwayEngine, "headway", add_arguments)
