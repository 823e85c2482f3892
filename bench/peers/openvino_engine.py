"""OpenVINO GenAI's continuous batching in this process; the model is a directory in OpenVINO's own format."""

from __future__ import annotations

import argparse
import importlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest


class OpenVinoEngine(PeerEngine):
    """OpenVINO pipeline, remade when the concurrency changes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._openvino = importlib.import_module("openvino")
        self._genai = importlib.import_module("openvino_genai")
        self._pipeline: Any = None
        self._concurrency = 0

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Step until all have ended. A request is added when another ends: the pipeline ignores its own limit."""
        self._start(concurrency)
        waiting, handles = deque(requests), dict[int, Any]()
        token_s: dict[int, list[float]] = {request.number: [] for request in requests}
        num_wanted = {request.number: request.num_output_tokens for request in requests}
        started_s = time.perf_counter()
        while waiting or handles:
            while waiting and len(handles) < concurrency:
                request = waiting.popleft()
                handles[request.number] = self._add(request)
            self._pipeline.step()
            now = time.perf_counter()
            for number, handle in list(handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        token_s[number] += [now] * len(output.generated_ids)
                if len(token_s[number]) >= num_wanted[number]:
                    del handles[number]
        return Events(token_s, started_s, time.perf_counter())

    def _add(self, request: PeerRequest) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.num_output_tokens
        config.ignore_eos, config.do_sample, config.eos_token_id = True, False, 2
        prompt = self._openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(request.number, prompt, config)

    def _start(self, concurrency: int) -> None:
        if self._concurrency == concurrency:
            return
        self._pipeline = None
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = concurrency
        scheduler.max_num_batched_tokens = self._arguments.max_batch_tokens
        scheduler.num_kv_blocks = self._arguments.blocks
        scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, True
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            self._arguments.model,
            scheduler_config=scheduler,
            device="CPU",
            properties={
                "INFERENCE_NUM_THREADS": self._arguments.threads,
                "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp32": "f32"}[self._arguments.dtype],
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
            },
        )
        self._concurrency = concurrency


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=1024, help="KV blocks, of 32 tokens each on CPU")
    parser.add_argument("--max-batch-tokens", type=int, default=512)


if __name__ == "__main__":
    driver.main(OpenVinoEngine, "OpenVINO GenAI", _add_arguments)
