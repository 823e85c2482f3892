"""transformers' own continuous batching, in its own thread."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest
from bench.peers.transformers_generate import load


class ContinuousBatching(PeerEngine):
    """Batching manager, remade when the concurrency changes; `config` are fields of `ContinuousBatchingConfig`."""

    def __init__(self, model: Any, **config: Any) -> None:
        self._model = model
        self._config = config
        self._manager: Any = None
        self._concurrency = 0

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Add all requests at once; read each when it has ended."""
        self._start(concurrency)
        started_s = time.perf_counter()
        for request in requests:
            self._manager.add_request(
                list(request.prompt), request_id=f"r{request.number}", max_new_tokens=request.num_output_tokens,
                record_timestamps=True, eos_token_id=-1,
            )  # fmt: skip
        token_s: dict[int, list[float]] = {}
        while len(token_s) < len(requests):
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager has ended")
            elif output.is_finished():
                if output.error:
                    raise RuntimeError(output.error)
                token_s[int(output.request_id[1:])] = list(output.timestamps)
        return Events(token_s, started_s, time.perf_counter())

    def _start(self, concurrency: int) -> None:
        if self._concurrency == concurrency:
            return
        self.close()
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=512, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=concurrency, allow_block_sharing=False, **self._config
            ),
        )
        self._manager.start()
        self._concurrency = concurrency

    def close(self) -> None:
        """Stop the manager's thread."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10)
            self._manager.destroy()
            self._manager = None


def make(arguments: argparse.Namespace) -> ContinuousBatching:
    """Load the model, with a KV cache of fixed size."""
    return ContinuousBatching(
        load(arguments),
        num_blocks=arguments.blocks,
        page_size=arguments.page,
        max_batch_tokens=arguments.max_batch_tokens,
        auto_switch_to_flash=False,
        seed=0,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--max-batch-tokens", type=int, default=512)


if __name__ == "__main__":
    driver.main(make, "transformers continuous batching", _add_arguments)
