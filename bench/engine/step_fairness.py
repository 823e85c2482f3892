"""Effect of a long prefill on running decodes: `python -m bench.engine.step_fairness`.

Eight sequences decode; then a long prompt arrives. Each round measures, in the same process, the gap between two tokens
of the decodes undisturbed, the same gap while the prompt prefills, and the prefill alone. The promise has two parts.
The gap's p99 grows by at most the cost of one chunk. An operator can choose a chunk size (`max_num_batched_tokens`) at
which it grows by at most half.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from bench.engine.engines import exact_request, load_runner, make_engine, model_parser, pseudo_random_tokens
from bench.record import percentile, write
from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.model.loading.options import ModelOptions
from replicas.model.runner import TorchModelRunner

NUM_DECODING = 8
DECODE_PROMPT_TOKENS = 64
UNDISTURBED_STEPS = 150
_LONG = NUM_DECODING
"""Number of the request with the long prompt; those before it decode."""


@dataclass(frozen=True)
class Fairness:
    """Figures at one token budget, in milliseconds.

    Each is the median over the rounds of a round's percentile, so that one stall in one round has no effect.
    """

    max_num_batched_tokens: int
    undisturbed_p50_ms: float
    undisturbed_p99_ms: float
    disturbed_p50_ms: float
    disturbed_p99_ms: float
    chunk_p50_ms: float
    chunk_p99_ms: float
    prefill_alone_ms: float
    prefill_beside_decodes_ms: float

    @property
    def ratio(self) -> float:
        """Inter-token p99 beside a prefill / undisturbed."""
        return self.disturbed_p99_ms / self.undisturbed_p99_ms

    @property
    def keeps_promise(self) -> bool:
        """True if the p99 grew by at most the cost of one chunk."""
        return self.disturbed_p99_ms <= self.undisturbed_p99_ms + self.chunk_p99_ms

    @property
    def prefill_slowdown(self) -> float:
        """Time to the long prompt's first token beside the decodes / alone."""
        return self.prefill_beside_decodes_ms / self.prefill_alone_ms


def prefill_alone(runner: TorchModelRunner, budget: int) -> list[float]:
    """Return the seconds of each step of the long prompt's prefill, with no other work."""
    engine = _engine(runner, budget)
    _add(engine, _LONG, _long_prompt_tokens(runner), 1)
    seconds = []
    while engine.has_work:
        seconds.append(_timed_step(engine)[0])
    return seconds


def beside_decodes(runner: TorchModelRunner, budget: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each decode step undisturbed, and of each while the long prompt prefills."""
    engine = _engine(runner, budget)
    for number in range(NUM_DECODING):
        _add(engine, number, DECODE_PROMPT_TOKENS, runner.max_model_len - DECODE_PROMPT_TOKENS)
    while _num_tokens(engine) < NUM_DECODING:
        assert engine.has_work, "the sequences ended before all of them decoded together"
    undisturbed = [_timed_step(engine)[0] for _ in range(UNDISTURBED_STEPS)]
    _add(engine, _LONG, _long_prompt_tokens(runner), 1)
    disturbed: list[float] = []
    is_done = False
    while not is_done:
        seconds, ended = _timed_step(engine)
        disturbed.append(seconds)
        is_done = str(_LONG) in ended
    return undisturbed, disturbed


def _engine(runner: TorchModelRunner, budget: int) -> Engine:
    return make_engine(runner, max_num_seqs=NUM_DECODING + 1, max_num_batched_tokens=budget)


def _add(engine: Engine, number: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
    engine.add(exact_request(number, pseudo_random_tokens(number, num_prompt_tokens), num_output_tokens))


def _long_prompt_tokens(runner: TorchModelRunner) -> int:
    return runner.max_model_len - 16


def _num_tokens(engine: Engine) -> int:
    return sum(len(delta.token_ids) for delta in engine.step())


def _timed_step(engine: Engine) -> tuple[float, set[str]]:
    """Run one step; return its seconds and the requests that ended with it."""
    started_s = time.perf_counter()
    deltas = engine.step()
    return time.perf_counter() - started_s, {delta.request_id for delta in deltas if delta.finish_reason}


def measure(runner: TorchModelRunner, budget: int, rounds: int) -> Fairness:
    """Measure all rounds at one budget; alone and beside alternate, so that noise hits both."""
    measured = [(prefill_alone(runner, budget), *beside_decodes(runner, budget)) for _ in range(rounds)]
    chunks, undisturbed, disturbed = zip(*measured, strict=True)
    return Fairness(
        max_num_batched_tokens=budget,
        undisturbed_p50_ms=_median_percentile_ms(undisturbed, 50),
        undisturbed_p99_ms=_median_percentile_ms(undisturbed, 99),
        disturbed_p50_ms=_median_percentile_ms(disturbed, 50),
        disturbed_p99_ms=_median_percentile_ms(disturbed, 99),
        chunk_p50_ms=_median_percentile_ms(chunks, 50),
        chunk_p99_ms=_median_percentile_ms(chunks, 99),
        prefill_alone_ms=percentile([sum(alone) for alone in chunks], 50) * 1e3,
        prefill_beside_decodes_ms=percentile([sum(busy) for busy in disturbed], 50) * 1e3,
    )


def _median_percentile_ms(rounds: Iterable[list[float]], percent: float) -> float:
    return percentile([percentile(seconds, percent) for seconds in rounds], 50) * 1e3


def main() -> None:
    """Measure at every budget, print the table, name the budget that keeps the ratio at 1.5."""
    parser = model_parser(__doc__, "step_fairness", num_threads=1)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--budgets", default="512,256,128,64,32,16,12", help="values of max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = ModelOptions(arguments.model, arguments.dtype, "auto", arguments.max_model_len, arguments.threads)
    runner = load_runner(model, EngineLimits())
    budgets = [int(budget) for budget in arguments.budgets.split(",")]
    prefill_alone(runner, budgets[0])
    print(f"{NUM_DECODING} decodes, a prompt of {_long_prompt_tokens(runner)} tokens; ms, {arguments.rounds} rounds")
    print("budget  calm p50/p99   beside p50/p99  ratio  chunk p50/p99  kept  prefill alone/beside  slowdown")
    results = []
    for budget in budgets:
        result = measure(runner, budget, arguments.rounds)
        results.append(result)
        print(
            f"{budget:6d}  {result.undisturbed_p50_ms:5.1f} {result.undisturbed_p99_ms:6.1f}"
            f"   {result.disturbed_p50_ms:6.1f} {result.disturbed_p99_ms:6.1f}   {result.ratio:5.2f}"
            f"  {result.chunk_p50_ms:6.1f} {result.chunk_p99_ms:6.1f}  {result.keeps_promise!s:5s}"
            f"  {result.prefill_alone_ms:7.0f} {result.prefill_beside_decodes_ms:8.0f}"
            f"    {result.prefill_slowdown:5.2f}"
        )
    within = [result.max_num_batched_tokens for result in results if result.ratio <= 1.5]
    print(f"largest budget whose inter-token p99 stays within 1.5x: {max(within) if within else 'none of these'}")
    figures = [
        {**asdict(r), "ratio": r.ratio, "keeps_promise": r.keeps_promise, "prefill_slowdown": r.prefill_slowdown}
        for r in results
    ]
    print(write(arguments.name, {"rounds": arguments.rounds, "budgets": figures}))


if __name__ == "__main__":
    main()
