"""transformers' `generate()` as a runner of static batches."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from bench.baselines.engine_batches import TokenTimes
from bench.baselines.trace import TraceRequest
from bench.peers.transformers_generate import StaticGenerate
from bench.peers.workload import PeerRequest
from replicas.model.hardware.device import choose_device, choose_dtype

_TORCH_NAMES = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}


class GenerateBatches:
    """The plain model, in the dtype that Headway's loader would choose."""

    def __init__(self, model: str, dtype: str, num_threads: int) -> None:
        chosen = _TORCH_NAMES[str(choose_dtype(dtype, choose_device("cpu")))]
        self._model = StaticGenerate(Namespace(model=model, dtype=chosen, threads=num_threads, static=10**6))

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Run `batch`, left-padded, to the end of its longest request."""
        requests = [PeerRequest(r.number, r.prompt, r.num_output_tokens) for r in batch]
        return self._model.run(requests, concurrency=1).token_s
