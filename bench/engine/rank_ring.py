"""Time that the ranks of a replica add to a step on the host: `python -m bench.engine.rank_ring --sequences 64,256`.

Each step of decodes is planned as for CUDA graphs, published in the ring and read again, by one process. No device
computes it. The target is a median of at most 60 us for plan, write and read together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bench.engine.engines import exact_request, make_engine, model_parser, pseudo_random_tokens
from bench.record import percentiles, write
from replicas.engine.batch import ScheduledBatch, StepResults
from replicas.model.attention.layer_groups import grouped_cache
from replicas.model.cuda_graphs.graphs import SMALL_MIXED, step_shapes
from replicas.model.cuda_graphs.padding import StepPadding
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions
from replicas.model.planner import StepPlanner
from replicas.model.ranks.messages import MessageForm, RankMessage
from replicas.model.ranks.ring import RingFiles, RingReader, RingWriter
from replicas.model.runner import TorchModelRunner
from replicas.model.sampling.token_counts import CountSlots

_TARGET_US = 60.0
_BLOCK_SIZE, _MAX_BLOCKS, _MAX_TOKENS = 16, 256, 2048
_CONTEXT, _NUM_STEPS, _NUM_WARM_UP_STEPS = 512, 1000, 100
_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class NullStep:
    """Step that nothing computes; every token is the same."""

    num_items: int

    def sample(self) -> None:
        """Do nothing."""

    def collect(self) -> StepResults:
        """Return a token for each item."""
        return StepResults(np.full(self.num_items, 5), {})


@dataclass(frozen=True, slots=True)
class NullRunner:
    """Runner that plans and publishes steps, reads them again, and notes the times."""

    planner: StepPlanner
    writer: RingWriter
    reader: RingReader
    forms: tuple[MessageForm, MessageForm] = field(default_factory=lambda: (MessageForm(), MessageForm()))
    """Forms of the writer and of the reader."""
    times_us: list[list[float]] = field(default_factory=list)
    """Times of plan, write and read of each step."""

    def launch(self, batch: ScheduledBatch) -> NullStep:
        """Plan, write and read a step."""
        begun = time.perf_counter()
        message = self.planner.plan(batch).message
        planned = time.perf_counter()
        self.writer.write(self.forms[0].to_bytes(RankMessage(1, message, samples=True)))
        written = time.perf_counter()
        published = self.reader.read(_LIMIT_S)
        assert published is not None
        self.forms[1].of_bytes(published)
        ended = time.perf_counter()
        moments = (begun, planned, written, ended)
        self.times_us.append([1e6 * (end - start) for start, end in pairwise(moments)])
        return NullStep(len(batch))


def measure(model: ModelOptions, num_seqs: int) -> dict[str, float]:
    """Return the median times of steps of `num_seqs` decodes, and the 99th percentile of their sums, microseconds."""
    loaded = load_model(model)
    cache = grouped_cache(loaded.layer_groups(loaded.dtype), 0, _BLOCK_SIZE, loaded.dtype, loaded.device)
    padding = StepPadding(step_shapes(num_seqs, _MAX_TOKENS, SMALL_MIXED), _MAX_BLOCKS)
    planner = StepPlanner(loaded, cache, padding, CountSlots(num_seqs, loaded.vocab_size))
    files = RingFiles.create(1)
    runner = NullRunner(planner, RingWriter(files), RingReader(files, 0))
    engine = make_engine(
        TorchModelRunner(loaded, cache), launcher=runner, num_blocks=num_seqs * _MAX_BLOCKS, max_num_seqs=num_seqs,
        max_num_batched_tokens=_MAX_TOKENS, max_model_len=_MAX_BLOCKS * _BLOCK_SIZE, async_scheduling=True,
    )  # fmt: skip
    num_output_tokens = _NUM_STEPS + 4 * _NUM_WARM_UP_STEPS
    for number in range(num_seqs):
        engine.add(exact_request(number, pseudo_random_tokens(number, _CONTEXT), num_output_tokens))
    num_begun = 0
    while num_begun < num_seqs:
        num_begun += sum(bool(delta.token_ids) and delta.usage.completion_tokens == 1 for delta in engine.step())
    for _ in range(_NUM_WARM_UP_STEPS):
        engine.step()
    runner.times_us.clear()
    for _ in range(_NUM_STEPS):
        engine.step()
    files.close()
    medians = {name: percentiles(times, [50])[0] for name, times in zip(
        ("plan", "write", "read"), zip(*runner.times_us, strict=True), strict=True)}  # fmt: skip
    median, highest = percentiles(map(sum, runner.times_us), [50, 99])
    return {**medians, "sum": median, "sum_p99": highest}


def main() -> None:
    """Measure each number of sequences, print the medians, and whether the target is kept."""
    parser = model_parser(__doc__, "rank_ring", num_threads=1, dtype="float32")
    parser.add_argument("--sequences", default="64,256", help="numbers of sequences, separated by commas")
    arguments = parser.parse_args()
    model = ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads, kernel_cache_dir=None)
    figures = {}
    for num_seqs in map(int, arguments.sequences.split(",")):
        found = figures[f"{num_seqs}"] = measure(model, num_seqs)
        verdict = "kept" if found["sum"] <= _TARGET_US else "not kept"
        print(
            f"{num_seqs} sequences: plan {found['plan']:.0f} us, write {found['write']:.0f}, read {found['read']:.0f}, "
            f"together {found['sum']:.0f} (at most {_TARGET_US:g}: {verdict}), p99 {found['sum_p99']:.0f}"
        )
    print(write(arguments.name, {"us": figures, "target_us": _TARGET_US}))


if __name__ == "__main__":
    main()
