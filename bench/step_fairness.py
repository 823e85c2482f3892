"""Effect of a long prefill on running decodes: `python -m bench.step_fairness`.

Eight sequences decode; then a long prompt arrives. Compared in the same process, round by round: the gap between two
tokens of the decodes undisturbed, the same gap while the prompt prefills, and the prefill alone. The promise: the gap's
p99 grows by at most the cost of one chunk, and an operator can choose a chunk size (`max_num_batched_tokens`) at
which it grows by at most half.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass

from bench.record import percentile, write
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.engine.interfaces import IncrementalDecoder
from replicas.model.build import build_runner
from replicas.model.loading.loader import LoadedModel, load_model
from replicas.model.loading.options import Dtype, ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import make_decoder
from replicas.model.runner import TorchModelRunner
from replicas.protocol import GenerateRequest, ReplicaIdentity, SamplingParams

NUM_DECODING = 8
DECODE_PROMPT_TOKENS = 64
UNDISTURBED_STEPS = 150


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


class Bench:
    """Engines over one loaded model, one for each budget and round."""

    def __init__(self, model: str, dtype: Dtype, num_threads: int, max_model_len: int) -> None:
        self._loaded: LoadedModel = load_model(ModelOptions(model, dtype, "auto", max_model_len, num_threads))
        self._runner: TorchModelRunner = build_runner(self._loaded, EngineLimits(), RunnerOptions())
        self.long_prompt_tokens = self._loaded.max_model_len - 16
        self._num_requests = 0

    def engine(self, budget: int) -> Engine:
        """Return a fresh engine without prefix caching, so that every round computes the same."""
        config = EngineConfig(
            num_blocks=self._runner.num_blocks,
            max_model_len=self._loaded.max_model_len,
            max_num_seqs=NUM_DECODING + 1,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        return Engine(config, self._runner, self._decoder, ReplicaIdentity("bench", "bench", 0))

    def request(self, num_prompt_tokens: int, max_tokens: int) -> GenerateRequest:
        """Return a greedy request with its own pseudo-random tokens."""
        self._num_requests += 1
        modulus = self._loaded.vocab_size - 10
        prompt = tuple((self._num_requests * 7919 + 31 * index) % modulus + 5 for index in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return GenerateRequest(f"r{self._num_requests}", prompt, params)

    def _decoder(self, request: GenerateRequest) -> IncrementalDecoder:
        return make_decoder(self._loaded.tokenizer, request.prompt_token_ids)

    def prefill_alone(self, budget: int) -> list[float]:
        """Return the seconds of each step of the long prompt's prefill, with no other work."""
        engine = self.engine(budget)
        engine.add(self.request(self.long_prompt_tokens, 1))
        return _step_until_done(engine)

    def beside_decodes(self, budget: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each decode step undisturbed, and of each while the long prompt prefills."""
        engine = self.engine(budget)
        for _ in range(NUM_DECODING):
            engine.add(self.request(DECODE_PROMPT_TOKENS, self._loaded.max_model_len - DECODE_PROMPT_TOKENS))
        while _num_tokens(engine) < NUM_DECODING:
            assert engine.has_work, "the sequences ended before all of them decoded together"
        undisturbed = [_timed_step(engine)[0] for _ in range(UNDISTURBED_STEPS)]
        long = self.request(self.long_prompt_tokens, 1)
        engine.add(long)
        disturbed: list[float] = []
        is_done = False
        while not is_done:
            seconds, ended = _timed_step(engine)
            disturbed.append(seconds)
            is_done = long.request_id in ended
        return undisturbed, disturbed


def _num_tokens(engine: Engine) -> int:
    return sum(len(delta.token_ids) for delta in engine.step())


def _timed_step(engine: Engine) -> tuple[float, set[str]]:
    """Run one step; return its seconds and the requests that ended with it."""
    started_s = time.perf_counter()
    deltas = engine.step()
    return time.perf_counter() - started_s, {delta.request_id for delta in deltas if delta.finish_reason}


def _step_until_done(engine: Engine) -> list[float]:
    seconds: list[float] = []
    while engine.has_work:
        seconds.append(_timed_step(engine)[0])
    return seconds


def measure(bench: Bench, budget: int, rounds: int) -> Fairness:
    """Measure all rounds at one budget; alone and beside alternate, so that noise hits both."""
    undisturbed: list[list[float]] = []
    disturbed: list[list[float]] = []
    chunks: list[list[float]] = []
    alone_s: list[float] = []
    for _ in range(rounds):
        alone = bench.prefill_alone(budget)
        calm, busy = bench.beside_decodes(budget)
        chunks.append(alone)
        alone_s.append(sum(alone))
        undisturbed.append(calm)
        disturbed.append(busy)
    return Fairness(
        max_num_batched_tokens=budget,
        undisturbed_p50_ms=_median_percentile_ms(undisturbed, 50),
        undisturbed_p99_ms=_median_percentile_ms(undisturbed, 99),
        disturbed_p50_ms=_median_percentile_ms(disturbed, 50),
        disturbed_p99_ms=_median_percentile_ms(disturbed, 99),
        chunk_p50_ms=_median_percentile_ms(chunks, 50),
        chunk_p99_ms=_median_percentile_ms(chunks, 99),
        prefill_alone_ms=percentile(alone_s, 50) * 1e3,
        prefill_beside_decodes_ms=percentile([sum(busy) for busy in disturbed], 50) * 1e3,
    )


def _median_percentile_ms(rounds: list[list[float]], percent: float) -> float:
    return percentile([percentile(seconds, percent) for seconds in rounds], 50) * 1e3


def main() -> None:
    """Measure at every budget, print the table, name the budget that keeps the ratio at 1.5."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="replicas/demo", help="directory or hub id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--budgets", default="512,256,128,64,32,16,12", help="values of max_num_batched_tokens")
    parser.add_argument("--name", default="step_fairness", help="name of the result file")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.dtype, arguments.threads, arguments.max_model_len)
    budgets = [int(budget) for budget in arguments.budgets.split(",")]
    bench.prefill_alone(budgets[0])
    print(f"{NUM_DECODING} decodes, a prompt of {bench.long_prompt_tokens} tokens; ms, {arguments.rounds} rounds")
    print("budget  calm p50/p99   beside p50/p99  ratio  chunk p50/p99  kept  prefill alone/beside  slowdown")
    results = []
    for budget in budgets:
        result = measure(bench, budget, arguments.rounds)
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
    command = "python -m bench.step_fairness " + " ".join(sys.argv[1:])
    print(write(arguments.name, command, {"rounds": arguments.rounds, "budgets": figures}))


if __name__ == "__main__":
    main()
