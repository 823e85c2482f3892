"""Cost of an engine step outside the device: `python -m bench.engine.scheduler_step`.

The real engine over a runner that computes nothing. The timed work is scheduling the step, applying its results and
making the deltas. There are two states. In one all running sequences decode. In the other one in twenty ends in each
step, and a waiting one takes its place. Sizes vary in running and in waiting sequences, to show the growth. Beside each
size a bare loop over as many sequences measures the speed of the machine at that moment.

A third state is a replica with a GPU: all sequences decode a step ahead, with the tokenizer of the demo model, the plan
of each step for CUDA graphs, the reading of its tokens and the report of the load. Its time is given as a multiple of
the bare loop's, as the clock of a shared machine is not steady. Two sizes are also measured with a model that has
recurrent layers, with stop strings, and with a grammar for each sequence.

`--vllm-python PATH` compares that state, without the plan of the step, with vLLM's scheduler and output processor on
the same trace, by turns. PATH is the interpreter of vLLM's own virtual environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.record import percentile, write
from replicas.engine.batch import ScheduledBatch, StepResults
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.output_processor import DecoderFactory
from replicas.model.batch.transfers import DeviceToHostBuffer
from replicas.model.cuda_graphs.graphs import step_shapes
from replicas.model.cuda_graphs.padding import StepPadding
from replicas.model.loading.tokenizer import make_decoder
from replicas.model.planner import PlannedStep, StepPlanner
from replicas.model.sampling.sampler import PendingTokens
from replicas.protocol import Band, FinishReason, GenerateRequest, SamplingParams, TokenDelta, Usage
from replicas.text.grammar import GrammarCompiler, regex_grammar
from replicas.text.tokenizer_files import load_tokenizer
from testkit.engine.shadow_runner import IDENTITY, decoders

NUM_RUNNING, NUM_WAITING, PROMISE_MS = 256, 2000, 2.0
_SIZES = (
    *((NUM_RUNNING, num_waiting) for num_waiting in (0, 500, NUM_WAITING, 8000, 32_000)),
    *((num_running, NUM_WAITING) for num_running in (32, 64, 128, 512, 1024)),
)
_SERVED_SIZES = (1, 8, 64, 256, 1024)
_ROOT = Path(__file__).resolve().parents[2]
_MAX_MODEL_LEN = 4096
_LONG_OUTPUT, _SHORT_OUTPUT = 100_000, 20
"""Mean output tokens: with long outputs no sequence ends, with short ones one in twenty ends in each step."""
_ANY_TEXT = regex_grammar("(?s:.*)")
_STOPS, _MOST_TOKENS = frozenset({0}), 10**6


class Kind(StrEnum):
    """Kind of the sequences of a replica."""

    TEXT = "text"
    RECURRENT = "recurrent layers"
    STOP_STRINGS = "stop strings"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class FreeStep:
    """Step with its results already present."""

    results: StepResults

    def sample(self) -> None:
        """Do nothing: the results are known."""

    def collect(self) -> StepResults:
        """Return the results."""
        return self.results


@dataclass(slots=True)
class FreeRunner:
    """Runner without a device; its own CPU time is counted separately."""

    spent_s: float = 0.0

    def launch(self, batch: ScheduledBatch) -> FreeStep:
        """Return the same token for every sampled item."""
        started_s = time.thread_time()
        step = FreeStep(StepResults(np.where(batch.columns.samples, 7, -1), {}))
        self.spent_s += time.thread_time() - started_s
        return step


@dataclass(frozen=True, slots=True)
class PlannedOnly:
    """Planned step whose tokens are on the host already."""

    planned: PlannedStep
    tokens: PendingTokens
    to_host: DeviceToHostBuffer

    def sample(self) -> None:
        """Wait for the masks, which allow the tokens."""
        if self.planned.masks is not None:
            self.planned.masks.message()

    def collect(self) -> StepResults:
        """Read the tokens as those of a device are read."""
        return self.planned.read(self.tokens, [], self.to_host)


class PlanningRunner:
    """Runner that plans steps for CUDA graphs and gives tokens of a text; the time that the tokens take is counted."""

    def __init__(self, config: EngineConfig, token_ids: list[int]) -> None:
        loaded: Any = SimpleNamespace(eos_token_ids=frozenset(), vocab_size=config.vocab_size, is_batch_invariant=False)
        cache: Any = SimpleNamespace(block_size=config.block_size, groups=[SimpleNamespace(layers_per_column=1)])
        has_states = config.num_state_slots > 0
        shapes = step_shapes(config.max_num_seqs, config.max_num_batched_tokens, has_states=has_states)
        padding = StepPadding(shapes, _MAX_MODEL_LEN // config.block_size)
        self._planner = StepPlanner(loaded, cache, padding, None)
        self._text = torch.tensor(token_ids)
        self._num_steps = 0
        self.spent_s = 0.0

    def launch(self, batch: ScheduledBatch) -> PlannedOnly:
        """Plan the step; its tokens continue the text from another place for each row."""
        planned = self._planner.plan(batch)
        started_s = time.thread_time()
        self._num_steps += 1
        to_host = DeviceToHostBuffer()
        tokens = self._text[(torch.arange(len(planned.indices)) * 31 + self._num_steps) % len(self._text)]
        pending = to_host.add(torch.stack([tokens, torch.ones_like(tokens)]))
        self.spent_s += time.thread_time() - started_s
        return PlannedOnly(planned, PendingTokens(tokens, pending, None), to_host)


@dataclass(slots=True)
class TextRunner:
    """Runner without a device or a plan that gives tokens of a text; its own CPU time is counted separately."""

    text: np.ndarray
    num_steps: int = 0
    spent_s: float = 0.0

    def launch(self, batch: ScheduledBatch) -> FreeStep:
        """Return tokens that continue the text from another place for each row."""
        started_s = time.thread_time()
        self.num_steps += 1
        tokens = self.text[(np.arange(len(batch)) * 31 + self.num_steps) % len(self.text)]
        step = FreeStep(StepResults(np.where(batch.columns.samples, tokens, -1), {}))
        self.spent_s += time.thread_time() - started_s
        return step


@dataclass(frozen=True, slots=True)
class StepCost:
    """CPU time of one step, in milliseconds."""

    num_running: int
    num_waiting: int
    decoding_ms: float
    decoding_p99_ms: float
    changing_ms: float
    """Time with one in twenty sequences ending in each step."""
    bare_loop_ms: float
    """Time of the bare loop, which only creates and counts objects."""


@dataclass(frozen=True, slots=True)
class ServedCost:
    """CPU time of one step of a replica with a GPU, in milliseconds, and as a multiple of the bare loop's."""

    num_running: int
    temperature: float
    kind: Kind
    step_ms: float
    bare_loop_ms: float
    multiple: float = field(default=0.0)


@dataclass
class TextOfDemo:
    """Tokenizer of the demo model, and the token ids of a text."""

    tokenizer: Any = field(default_factory=lambda: load_tokenizer(str(_ROOT / "replicas" / "demo")))

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Compiler of grammars."""
        return GrammarCompiler(self.tokenizer, len(self.tokenizer))

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first page of the project."""
        ids: list[int] = self.tokenizer.encode((_ROOT / "README.md").read_text(), add_special_tokens=False)
        return ids

    def decoders(self) -> DecoderFactory:
        """Return the factory of decoders that a replica has."""
        return lambda request: make_decoder(self.tokenizer, request.prompt_token_ids, request.params)


def measure_served(trace: Trace, num_steps: int) -> ServedCost:
    """Measure steps of a replica with a GPU in turns with bare loops; the smallest of three tenth percentiles counts.

    Other work on the machine slows steps down, which touch much memory, and bare loops less.
    """
    turns = []
    for _ in range(3):
        step_ms = percentile(_trace_ms(trace, PlanningRunner(trace.config, trace.text.token_ids), num_steps), 10)
        bare_ms = percentile(_bare_loops_ms(trace.num_running, num_steps), 10)
        facts = trace.num_running, trace.temperature, trace.kind
        turns.append(ServedCost(*facts, step_ms, bare_ms, step_ms / bare_ms))
    return min(turns, key=lambda cost: cost.multiple)


@dataclass(frozen=True, slots=True)
class Trace:
    """Sequences that all decode, a step ahead, and the text that their tokens repeat."""

    text: TextOfDemo
    num_running: int
    temperature: float
    kind: Kind = Kind.TEXT

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        return EngineConfig(
            num_blocks=self.num_running * 256,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=self.num_running,
            max_num_batched_tokens=max(64, 8 * self.num_running),
            async_scheduling=True,
            vocab_size=len(self.text.tokenizer),
            eos_token_ids=frozenset({len(self.text.tokenizer)}),
            num_state_slots=8 * self.num_running * (self.kind is Kind.RECURRENT),
        )

    def requests(self) -> list[GenerateRequest]:
        """Return the requests; their prompts are parts of the text."""
        rng, token_ids = random.Random(0), self.text.token_ids
        requests = []
        for number in range(self.num_running):
            first = rng.randrange(len(token_ids) - 64)
            prompt = tuple(token_ids[first : first + rng.randint(8, 64)])
            params = SamplingParams(
                _MAX_MODEL_LEN - 64,
                self.temperature,
                top_p=0.95,
                seed=number,
                stop=("\n\nObservation:",) if self.kind is Kind.STOP_STRINGS else (),
                grammar=_ANY_TEXT if self.kind is Kind.GRAMMAR else None,
            )
            requests.append(GenerateRequest(f"r{number}", prompt, params))
        return requests

    def fields(self, num_steps: int) -> dict[str, Any]:
        """Return the trace for `bench.peers.vllm_steps`."""
        config = self.config
        return {
            "model": str(_ROOT / "replicas" / "demo"),
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_seqs": self.num_running,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, _MAX_MODEL_LEN),  # vLLM takes no less.
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
            "text": self.text.token_ids,
            "prompts": [request.prompt_token_ids for request in self.requests()],
            "temperature": self.temperature,
            "max_tokens": _MAX_MODEL_LEN - 64,
            "num_steps": num_steps,
        }


def _trace_ms(trace: Trace, runner: PlanningRunner | TextRunner, num_steps: int) -> list[float]:
    engine = Engine(trace.config, runner, trace.text.decoders(), IDENTITY)
    for request in trace.requests():
        engine.add(request, trace.text.compiler.constraint_of(request) if trace.kind is Kind.GRAMMAR else None)
    steps_ms: list[float] = []
    while len(steps_ms) < num_steps:
        started_s, runner.spent_s = time.thread_time(), 0.0
        deltas = engine.step()
        engine.stats()
        step_s = time.thread_time() - started_s - runner.spent_s
        if len(deltas) == trace.num_running:
            steps_ms.append(step_s * 1e3)
    return steps_ms


@dataclass(frozen=True, slots=True)
class PeerCost:
    """CPU time of a step without device and plan here and in vLLM, in milliseconds: medians of the turns."""

    num_running: int
    temperature: float
    step_ms: float
    vllm_ms: float
    share: float
    """`step_ms` / `vllm_ms`."""


@contextlib.contextmanager
def vllm_steps(python: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `bench.peers.vllm_steps` with vLLM's interpreter within the context."""
    command = [str(python), "-m", "bench.peers.vllm_steps"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def measure_beside(vllm: subprocess.Popen[str], trace: Trace, num_steps: int, num_turns: int) -> PeerCost:
    """Measure steps here and in vLLM by turns. Of each turn the tenth percentile counts, as in `measure_served`."""
    assert vllm.stdin is not None and vllm.stdout is not None
    here_ms, there_ms = [], []
    for _ in range(num_turns):
        here_ms.append(percentile(_trace_ms(trace, TextRunner(np.array(trace.text.token_ids)), num_steps), 10))
        print(json.dumps(trace.fields(num_steps)), file=vllm.stdin, flush=True)
        line = vllm.stdout.readline()
        while line and not line.startswith("["):
            line = vllm.stdout.readline()  # vLLM prints warnings there, too.
        if not line:
            raise SystemExit("vLLM's process has ended; its error is above")
        there_ms.append(percentile(json.loads(line), 10))
    step_ms, vllm_ms = median(here_ms), median(there_ms)
    return PeerCost(trace.num_running, trace.temperature, step_ms, vllm_ms, step_ms / vllm_ms)


def compare(python: Path, num_steps: int, num_turns: int) -> None:
    """Compare with vLLM, print the table and write it."""
    text = TextOfDemo()
    with vllm_steps(python) as vllm:
        costs = [measure_beside(vllm, Trace(text, size, 0.8), num_steps, num_turns) for size in (64, 256, 1024)]
    table = Table("running", "step, ms", "vLLM's step, ms", "share", title="step without device and plan")
    for cost in costs:
        table.add_row(str(cost.num_running), f"{cost.step_ms:.3f}", f"{cost.vllm_ms:.3f}", f"{cost.share:.2f}")
    Console(width=100).print(table)
    print(write("scheduler_step_vllm", {"num_turns": num_turns, "sizes": [asdict(cost) for cost in costs]}))


def measure(num_running: int, num_waiting: int, num_steps: int) -> StepCost:
    """Measure both states at one size."""
    decoding = _steps_ms(num_running, num_waiting, _LONG_OUTPUT, num_steps)
    bare = _bare_loops_ms(num_running, num_steps)
    changing = _steps_ms(num_running, num_waiting, _SHORT_OUTPUT, num_steps)
    p99_ms = percentile(decoding, 99)
    return StepCost(num_running, num_waiting, median(decoding), p99_ms, median(changing), median(bare))


def _steps_ms(num_running: int, num_waiting: int, mean_output: int, num_steps: int) -> list[float]:
    """Return the milliseconds of each step; the queue is refilled between steps, untimed."""
    rng, runner = random.Random(0), FreeRunner()
    config = EngineConfig(
        num_blocks=num_running * 256,
        max_model_len=4096,
        max_num_seqs=num_running,
        max_num_batched_tokens=8 * num_running,
        max_queued_requests=10**6,
        max_queued_tokens=10**9,
        vocab_size=2**31,
    )
    engine = Engine(config, runner, decoders, IDENTITY)
    num_added, is_settled = 0, False
    steps_ms: list[float] = []
    while len(steps_ms) < num_steps:
        stats = engine.stats()
        is_settled = is_settled or stats.num_running >= 0.9 * num_running
        for _ in range(num_running + num_waiting - stats.num_running - stats.num_waiting):
            num_added += 1
            engine.add(_request(num_added, mean_output, rng))
        started_s, runner.spent_s = time.thread_time(), 0.0
        engine.step()
        step_s = time.thread_time() - started_s - runner.spent_s
        if is_settled:
            steps_ms.append(step_s * 1e3)
    return steps_ms


def _bare_loops_ms(num_sequences: int, num_loops: int) -> list[float]:
    """Return the milliseconds of each bare loop.

    For every sequence a loop makes an item and a delta, appends the token and checks for the end. It has no queue,
    blocks, bands or text.
    """
    outputs: list[list[int]] = [[] for _ in range(num_sequences)]
    loops_ms = []
    for position in range(num_loops):
        started_s = time.thread_time()
        items, deltas = [], []
        for number, output in enumerate(outputs):
            items.append((number, position, position + 1))
            output.append(7)
            has_ended = output[-1] in _STOPS or len(output) > _MOST_TOKENS
            reason = FinishReason.LENGTH if has_ended else None
            deltas.append(TokenDelta("r", position, (7,), "a", Usage(1, len(output), 0), finish_reason=reason))
        loops_ms.append((time.thread_time() - started_s) * 1e3)
    return loops_ms


def _request(number: int, mean_output: int, rng: random.Random) -> GenerateRequest:
    prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(8, 64)))
    num_tokens = min(rng.randint(1, 2 * mean_output), 4096 - len(prompt))
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(f"r{number}", prompt, params, rng.choice(list(Band)))


def main() -> None:
    """Measure every size, print the table and whether the promise is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each state and size")
    parser.add_argument("--only-promise", action="store_true", help=f"{NUM_RUNNING} running, {NUM_WAITING} waiting")
    parser.add_argument("--only-served", action="store_true", help="steps of a replica with a GPU alone")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="compare with vLLM, and measure nothing else")
    parser.add_argument("--turns", type=int, default=3, help="turns of the comparison with vLLM")
    arguments = parser.parse_args()
    if arguments.vllm_python is not None:
        compare(arguments.vllm_python, arguments.steps, arguments.turns)
        return
    text = TextOfDemo()
    traces = [Trace(text, num_running, temperature) for num_running in _SERVED_SIZES for temperature in (0.0, 0.8)]
    traces += [
        Trace(text, num_running, 0.8, kind) for kind in Kind if kind is not Kind.TEXT for num_running in (64, 256)
    ]
    served = [measure_served(trace, arguments.steps) for trace in traces]
    Console(width=100).print(_served_table(served))
    if arguments.only_served:
        print(write("scheduler_step_served", {"served": [asdict(cost) for cost in served]}))
        return
    sizes = ((NUM_RUNNING, NUM_WAITING),) if arguments.only_promise else _SIZES
    costs = [measure(*size, arguments.steps) for size in sizes]
    Console(width=100).print(_table(costs))
    promised = next(cost for cost in costs if (cost.num_running, cost.num_waiting) == (NUM_RUNNING, NUM_WAITING))
    is_kept = promised.decoding_ms <= PROMISE_MS
    print(f"{NUM_RUNNING} running, {NUM_WAITING} waiting: at most {PROMISE_MS} ms: {'kept' if is_kept else 'not kept'}")
    figures = {
        "promise_ms": PROMISE_MS,
        "is_kept": is_kept,
        "sizes": [asdict(cost) for cost in costs],
        "served": [asdict(cost) for cost in served],
    }
    print(write("scheduler_step", figures))


def _served_table(costs: list[ServedCost]) -> Table:
    table = Table(
        "running", "temperature", "kind", "step, ms", "bare loop, ms", "multiple",
        title="step of a replica with a GPU",
    )  # fmt: skip
    for cost in costs:
        table.add_row(
            str(cost.num_running), f"{cost.temperature:.1f}", cost.kind.value,
            f"{cost.step_ms:.3f}", f"{cost.bare_loop_ms:.3f}", f"{cost.multiple:.2f}",
        )  # fmt: skip
    return table


def _table(costs: list[StepCost]) -> Table:
    table = Table(
        "running", "waiting", "all decode, ms", "p99", "1 in 20 changes, ms", "bare loop, ms",
        title="engine step, no device",
    )  # fmt: skip
    for cost in costs:
        table.add_row(
            str(cost.num_running), str(cost.num_waiting), f"{cost.decoding_ms:.2f}", f"{cost.decoding_p99_ms:.2f}",
            f"{cost.changing_ms:.2f}", f"{cost.bare_loop_ms:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
