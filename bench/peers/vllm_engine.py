"""vLLM's CPU build in this process, through `LLMEngine`; runs in vLLM's own virtual environment."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class VllmEngine(PeerEngine):
    """vLLM's `LLMEngine`, with at most `concurrency` requests added at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}"}
        os.environ.update(_ENVIRONMENT | threads)
        self._vllm = importlib.import_module("vllm")
        self._delta_kind = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._engine = self._vllm.LLMEngine.from_engine_args(
            self._vllm.EngineArgs(
                model=arguments.model,
                dtype=driver.DTYPES[arguments.dtype],
                max_model_len=1024,
                max_num_seqs=32,
                max_num_batched_tokens=arguments.max_batch_tokens,
                block_size=arguments.block,
                enable_prefix_caching=False,
                enforce_eager=not arguments.compile,
                disable_log_stats=True,
                seed=0,
            )
        )
        self._num_runs = 0

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Step until all have ended; add the next request as one ends."""
        self._num_runs += 1
        waiting, num_running = deque(requests), 0
        token_s: dict[int, list[float]] = {request.number: [] for request in requests}
        started_s = time.perf_counter()
        while waiting or num_running:
            while waiting and num_running < concurrency:
                self._add(waiting.popleft())
                num_running += 1
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                token_s[int(output.request_id.split("-")[1])] += [now] * len(output.outputs[0].token_ids)
                num_running -= output.finished
        return Events(token_s, started_s, time.perf_counter())

    def _add(self, request: PeerRequest) -> None:
        params: Any = self._vllm.SamplingParams(
            temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False,
            output_kind=self._delta_kind,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._engine.add_request(f"{self._num_runs}-{request.number}", prompt, params)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", type=int, choices=(0, 1), default=1)
    parser.add_argument("--max-batch-tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=32)


if __name__ == "__main__":
    driver.main(VllmEngine, "vLLM CPU", _add_arguments)
