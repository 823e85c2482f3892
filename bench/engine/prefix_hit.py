"""Time saved by a prefix hit: `python -m bench.engine.prefix_hit`.

Requests begin with the same system prompt and end in different questions. In each round a new system prompt comes
twice: first it is computed, then its blocks are found in the prefix cache. Nothing else runs.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from bench.engine.engines import exact_request, load_runner, make_engine, model_parser
from bench.record import percentile, write
from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.model.loading.options import ModelOptions

_LEAST_RATIO = 5.0
_OUTPUT_TOKENS = 4
_PROMPT_TOKEN_IDS = range(259, 4000)


def ttft_s(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Return the seconds to the first token of `prompt`, and the number of its cached tokens."""
    started_s = time.perf_counter()
    engine.add(exact_request("only", prompt, _OUTPUT_TOKENS))
    first: list[tuple[float, int]] = []
    while engine.has_work:
        deltas = engine.step()
        first += [(time.perf_counter() - started_s, each.usage.cached_tokens) for each in deltas if each.token_ids]
    return first[0]


def main() -> None:
    """Measure misses and hits in turn; print whether a hit is five times faster."""
    arguments = _parse()
    limits = EngineLimits(max_num_batched_tokens=arguments.max_batch_tokens)
    runner = load_runner(ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads), limits)
    engine = make_engine(runner, max_num_batched_tokens=arguments.max_batch_tokens, enable_prefix_caching=True)
    rng = random.Random(0)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(_PROMPT_TOKEN_IDS, k=num_tokens))

    misses, hits, shares = [], [], []
    for round_number in range(arguments.rounds + 1):
        system = draw(arguments.system_tokens)
        miss_s, found_by_miss = ttft_s(engine, system + draw(arguments.question_tokens))
        hit_s, found_by_hit = ttft_s(engine, system + draw(arguments.question_tokens))
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
    print(write(arguments.name, figures))


def _parse() -> argparse.Namespace:
    parser = model_parser(__doc__, "prefix_hit")
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
