"""`target_itl_ms` under the real engine: time moves only as a step's work says."""

import random
from dataclasses import dataclass, field
from statistics import fmean

import pytest

from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.protocol import Band
from testkit.engine.shadow_runner import IDENTITY, FakeClock, decoders, request
from testkit.engine.timed_runner import StepTimes, TimedRunner

pytestmark = pytest.mark.rotated

TARGET_MS = 50.0
# A small model on two processor cores: 20 ms with one sequence, 46 ms with 32; a token of a prompt costs 0.8 ms.
CPU = StepTimes(base_s=19e-3, per_decode_s=0.85e-3, per_prefill_token_s=0.8e-3)


def engine_config(target_itl_ms: float | None = TARGET_MS) -> EngineConfig:
    return EngineConfig(
        num_blocks=4096,
        max_model_len=2048,
        max_num_seqs=64,
        target_itl_ms=target_itl_ms,
        max_queued_requests=100_000,
        vocab_size=4096,
    )


@dataclass
class Simulation:
    """An engine whose steps take the time that `step_times` say, on a clock of its own."""

    config: EngineConfig
    step_times: StepTimes = CPU
    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    num_requests: int = 0
    stall_s: float = 0.0
    """Seconds that every step takes in addition."""

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        runner = TimedRunner(self.step_times, 4096, 2, lambda: self.clock.now, self._sleep)
        self.engine = Engine(self.config, runner, decoders, IDENTITY, self.clock.clock())

    def _sleep(self, seconds: float) -> None:
        # TimedRunner asks to be woken a little early and spins; a clock that nobody moves would spin for ever.
        self.clock.now += seconds + 200e-6 + self.stall_s

    @property
    def token_budget(self) -> float:
        metrics = self.engine.metrics().metrics
        return next(metric.value for metric in metrics if metric.name == "headway:step_token_budget")

    def add(self, num_prompt_tokens: int, max_tokens: int, band: Band = Band.STANDARD) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        prompt = tuple((self.num_requests * 31 + index) % 997 + 16 for index in range(num_prompt_tokens))
        self.engine.add(request(name, prompt, max_tokens, band, ignore_eos=True))
        return name

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for delta in self.engine.step():
                now, name = self.clock.now, delta.request_id
                if name in self.last_s:
                    self.gaps_ms.append((now - self.last_s[name]) * 1e3)
                self.first_s.setdefault(name, now)
                self.last_s[name] = now
            self.engine.check_invariants()

    def offer(self, requests_per_s: float, duration_s: float, seed: int = 0) -> None:
        """Poisson arrivals of mixed lengths."""
        rng = random.Random(seed)
        next_s, ends_s = self.clock.now, self.clock.now + duration_s
        while self.clock.now < ends_s:
            while next_s <= self.clock.now:
                self.add(rng.randint(32, 256), rng.randint(16, 192))
                next_s += rng.expovariate(requests_per_s)
            if self.engine.has_work:
                self.step()
            else:
                self.clock.now = next_s

    def settle(self, duration_s: float, requests_per_s: float) -> None:
        """Offer a load without recording it."""
        self.offer(requests_per_s, duration_s, seed=1)
        self.gaps_ms.clear()


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[int((len(values) - 1) * percent / 100)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("load", [3.0, 6.0, 12.0])
def test_token_gaps_stay_within_a_fifth_of_the_target(load: float):
    simulation = Simulation(engine_config())
    simulation.settle(10.0, load)
    simulation.offer(load, 40.0)
    assert 0.8 * TARGET_MS <= fmean(simulation.gaps_ms) <= 1.2 * TARGET_MS
    assert percentile(simulation.gaps_ms, 95) <= 1.2 * TARGET_MS


def test_without_a_target_the_same_load_exceeds_it():
    simulation = Simulation(engine_config(target_itl_ms=None))
    simulation.offer(4.0, 30.0)
    assert percentile(simulation.gaps_ms, 95) > 3 * TARGET_MS
    assert simulation.token_budget == simulation.config.max_num_batched_tokens


def test_steps_without_decodes_are_not_limited():
    simulation = Simulation(engine_config(target_itl_ms=1.0))
    started_s = simulation.clock.now
    name = simulation.add(1024, 1)
    while simulation.engine.has_work:
        simulation.step()
    alone_s = simulation.first_s[name] - started_s
    assert alone_s == pytest.approx(2 * 19e-3 + 1024 * 0.8e-3, rel=0.05), "two full steps"


def test_an_impossible_target_still_finishes_everything():
    simulation = Simulation(engine_config(target_itl_ms=0.001))
    names = [simulation.add(200, 40) for _ in range(100)]
    for _ in range(20_000):
        if not simulation.engine.has_work:
            break
        simulation.step()
    assert not simulation.engine.has_work
    assert set(simulation.last_s) == set(names)


def test_urgent_prompts_progress_beside_decodes_at_the_budget():
    simulation = Simulation(engine_config(target_itl_ms=10.0))
    for _ in range(40):
        simulation.add(8, 1500, Band.BATCH)
    simulation.step(60)
    urgent, equal = simulation.add(64, 4, Band.INTERACTIVE), simulation.add(64, 4, Band.BATCH)
    simulation.step(5)
    assert urgent in simulation.first_s, "a block a step: 64 tokens in four"
    assert equal not in simulation.first_s


def test_one_stall_of_the_machine_is_soon_forgotten():
    simulation = Simulation(engine_config())
    simulation.settle(20.0, 4.0)
    before = simulation.token_budget
    simulation.stall_s = 5.0
    simulation.step()
    assert before // 2 <= simulation.token_budget < before
    simulation.stall_s = 0.0
    simulation.gaps_ms.clear()
    simulation.offer(4.0, 20.0, seed=5)
    assert 0.8 * TARGET_MS <= fmean(simulation.gaps_ms) <= 1.2 * TARGET_MS
