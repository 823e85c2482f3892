"""Time saved by a prefix hit: `python -m bench.prefix_hit`.

Requests begin with the same system prompt and end in different questions. In each round a new system prompt comes
twice: first it is computed, then its blocks are found in the prefix cache. Nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from statistics import median

from bench.load.percentiles import percentile
from bench.record import write
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams

_LEAST_RATIO = 5.0
_OUTPUT_TOKENS = 4


class PrefixBench:
    """Engine with prefix caching over a loaded model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        loaded = load_model(ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads))
        limits = EngineLimits(max_num_batched_tokens=arguments.max_batch_tokens)
        runner = build_runner(loaded, limits, RunnerOptions(kv_cache_bytes=512 * 2**20))
        warm_up(runner, limits)
        config = EngineConfig(
            num_blocks=runner.num_blocks,
            max_model_len=min(loaded.max_model_len, runner.num_blocks * runner.block_size),
            max_num_batched_tokens=arguments.max_batch_tokens,
        )
        identity = ReplicaIdentity("bench", "bench", os.getpid())
        self._engine = Engine(config, runner, lambda _: SilentDecoder(), identity)
        self._rng = random.Random(0)
        self._most_token_id = min(8000, loaded.vocab_size - 1)
        self._num_requests = 0

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Return a new random prompt."""
        return tuple(self._rng.randint(259, self._most_token_id) for _ in range(num_tokens))

    def ttft_s(self, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Return the seconds to the first token of `prompt`, and the number of its cached tokens."""
        self._num_requests += 1
        params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        started_s = time.perf_counter()
        self._engine.add(GenerateRequest(f"r{self._num_requests}", prompt, params))
        first_s, num_cached = None, 0
        while self._engine.has_work:
            for delta in self._engine.step():
                if first_s is None and delta.token_ids:
                    first_s, num_cached = time.perf_counter() - started_s, delta.usage.cached_tokens
        assert first_s is not None
        return first_s, num_cached


def main() -> None:
    """Measure misses and hits in turn; print whether a hit is five times faster."""
    arguments = _parse()
    bench = PrefixBench(arguments)
    misses, hits, shares = [], [], []
    for round_number in range(arguments.rounds + 1):
        system = bench.tokens(arguments.system_tokens)
        miss_s, found_by_miss = bench.ttft_s(system + bench.tokens(arguments.question_tokens))
        hit_s, found_by_hit = bench.ttft_s(system + bench.tokens(arguments.question_tokens))
        assert found_by_miss == 0
        if round_number > 0:  # the first warms up
            misses.append(miss_s * 1e3)
            hits.append(hit_s * 1e3)
            shares.append(found_by_hit / arguments.system_tokens)
    ratio = median(misses) / median(hits)
    print(f"system prompt of {arguments.system_tokens} tokens, question of {arguments.question_tokens}; TTFT median: "
          f"miss {median(misses):.1f} ms, hit {median(hits):.1f} ms, {ratio:.1f} times "
          f"(at least {_LEAST_RATIO:g}: {'kept' if ratio >= _LEAST_RATIO else 'not kept'})")  # fmt: skip
    figures = {
        "miss_ttft_ms": {"p50": median(misses), "p99": percentile(misses, 99)},
        "hit_ttft_ms": {"p50": median(hits), "p99": percentile(hits, 99)},
        "ratio": ratio,
        "least_ratio": _LEAST_RATIO,
        "found_share_of_system_prompt": median(shares),
        "rounds": arguments.rounds,
    }
    print(write(arguments.name, "python -m bench.prefix_hit " + " ".join(sys.argv[1:]), figures))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="replicas/demo", help="directory or hub id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--name", default="prefix_hit", help="name of the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
