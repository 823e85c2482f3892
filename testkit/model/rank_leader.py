"""First rank of a small replica, in a process of its own that tests may kill.

Run `python -m testkit.model.rank_leader CHECKPOINT`, with `busy` behind it for a replica that always computes.
"""

from __future__ import annotations

import sys
import time

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.ranks.parts import lead_ranks
from replicas.model.ranks.processes import RankOptions
from replicas.protocol import SamplingParams
from testkit.model.engine_runs import Sizes, engine_over, random_prompts, tokens


def main() -> None:
    """Load the checkpoint of the command line on two ranks, print `ready`, and wait or compute."""
    model = ModelOptions(
        sys.argv[1], dtype="float32", device="cpu", max_model_len=128, kernel_cache_dir=None, tensor_parallel_size=2
    )
    limits = EngineLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    part = lead_ranks(RankOptions(model, RunnerOptions(kv_cache_bytes=2**20), limits))
    sizes = Sizes(part.runner.num_blocks, limits.max_num_batched_tokens, limits.max_num_seqs)
    engine = engine_over(part.runner, part.loaded, sizes, launcher=part.launcher)
    print("ready", flush=True)
    while sys.argv[2:] == ["busy"]:
        tokens(engine, random_prompts((5, 33, 60)), SamplingParams(max_tokens=40))
    while True:
        time.sleep(60.0)


if __name__ == "__main__":
    main()
