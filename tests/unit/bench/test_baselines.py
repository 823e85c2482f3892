"""The classic batchers over a simulated device: nobody is lost, nobody waits for ever, and the figures are right."""

import pytest

from bench.baselines.outcome import (
    EQUAL_STEPS,
    Outcome,
    StepCosts,
    WrongAnswers,
    allowed_gain,
    measure_costs,
    outcome_of,
)
from bench.baselines.policies import (
    CONTINUOUS,
    Adaptive,
    FixedSize,
    LengthBucketed,
    Limits,
    MemoryLimited,
    Method,
    Policy,
    Priority,
    methods,
)
from bench.baselines.serving_loop import StaticBatches, serve_continuously, serve_in_batches
from bench.baselines.trace import TraceRequest, TraceSpec, make_trace
from bench.engine.token_times import StepFigures, TimedEngine, Timeline, TokenTimes
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.protocol import Band
from testkit.engine.shadow_runner import IDENTITY, FakeClock, decoders
from testkit.engine.timed_runner import StepTimes, TimedRunner

pytestmark = pytest.mark.rotated

# Kernels whose time hardly depends on the batch, as on a device that reads its weights in every step.
STEP_TIMES = StepTimes(base_s=20e-3, per_decode_s=0.1e-3, per_prefill_token_s=0.1e-3)
LIMITS = Limits(max_num_seqs=8, kv_cache_tokens=4096, max_wait_s=0.5, window_s=0.1, target_s=5.0)
METHODS = methods(LIMITS)


class Simulation:
    """An engine on simulated time."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        clock = FakeClock()

        def sleep(seconds: float) -> None:
            # TimedRunner asks to be woken a little early and spins; a clock that nobody moves would spin for ever.
            clock.now += seconds + 200e-6

        self.timeline = Timeline(lambda: clock.now, sleep)
        config = EngineConfig(
            num_blocks=limits.kv_cache_tokens // 16, max_model_len=512, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=256, enable_prefix_caching=False, vocab_size=2**31,
        )  # fmt: skip
        runner = TimedRunner(STEP_TIMES, 4096, 2, self.timeline.clock, sleep)
        self.engine = TimedEngine(Engine(config, runner, decoders, IDENTITY, clock.clock()), self.timeline)

    def serve(self, trace: list[TraceRequest], method: Method) -> Outcome:
        return outcome_of(method.name, trace, self.answers(trace, method), self.engine.figures())

    def answers(self, trace: list[TraceRequest], method: Method) -> TokenTimes:
        runner = StaticBatches(self.engine, method.is_padded)
        return serve_in_batches(trace, method.make_policy(), runner, self.timeline)

    def continuous(self, trace: list[TraceRequest]) -> Outcome:
        answers = serve_continuously(trace, self.engine)
        return outcome_of(CONTINUOUS, trace, answers, self.engine.figures())


def ask(number: int, arrival_s: float = 0.0, prompt: int = 32, output: int = 8, band: Band = Band.STANDARD):
    return TraceRequest(number, arrival_s, tuple(range(300, 300 + prompt)), output, band)


BY_NAME = {method.name: method for method in METHODS}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("requests_per_s", [0.5, 8.0, 100.0])
def test_every_request_is_answered_once_and_in_full(method: Method, requests_per_s: float):
    trace = make_trace(TraceSpec(num_requests=37, requests_per_s=requests_per_s, seed=3))
    answers = Simulation().answers(trace, method)
    assert sorted(answers) == [request.number for request in trace]
    for request in trace:
        assert len(answers[request.number]) == request.num_output_tokens
        assert answers[request.number] == sorted(answers[request.number])
        assert answers[request.number][0] > request.arrival_s, "an answer before its question"


@pytest.mark.sampled(13)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("num_requests", [1, LIMITS.max_num_seqs - 1, LIMITS.max_num_seqs + 1])
def test_a_partial_batch_is_flushed_in_time(method: Method, num_requests: int):
    answers = Simulation().answers([ask(number) for number in range(num_requests)], method)
    longest_wait_s = max(LIMITS.max_wait_s, LIMITS.window_s, LIMITS.target_s / 4)
    num_batches = num_requests if method.name == "sequential" or "adaptive" in method.name else 2
    assert len(answers) == num_requests
    assert max(times[0] for times in answers.values()) < longest_wait_s + num_batches * 1.0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_request_starves_behind_a_stream_of_others(method: Method):
    lone = ask(0, 0.0, prompt=200, output=4)
    others = [ask(number, 0.05 * number, prompt=32, band=Band.INTERACTIVE) for number in range(1, 120)]
    answers = Simulation().answers([lone, *others], method)
    assert answers[0][-1] < 2.0


def test_a_lost_or_short_answer_is_an_error():
    trace = [ask(0), ask(1)]
    steps = StepFigures(1, 1, 1.0)
    with pytest.raises(WrongAnswers, match="1 answers"):
        outcome_of("x", trace, {0: [1.0] * 8}, steps)
    with pytest.raises(WrongAnswers):
        outcome_of("x", trace, {0: [1.0] * 8, 1: [1.0] * 7}, steps)


def test_padding_is_counted_and_idle_slots_are():
    trace = [ask(0, prompt=100, output=10), ask(1, prompt=50, output=40)]
    padded = Simulation().serve(trace, BY_NAME["fixed size, padded"])
    ragged = Simulation().serve(trace, BY_NAME["fixed size, no padding"])
    needed = 100 + 10 - 1 + 50 + 40 - 1
    assert padded.padding_efficiency == pytest.approx(needed / (2 * (100 + 40 - 1)))
    assert ragged.padding_efficiency == 1.0
    assert ragged.utilization is not None and padded.utilization is not None
    assert ragged.utilization < padded.utilization <= 2 / LIMITS.max_num_seqs


CHEAP_WHEN_FEW = StepCosts({1: 1.0, 2: 1.5}, prompt_token_s=0.5)


@pytest.mark.parametrize(
    ("costs", "batch_size", "gain"),
    [
        pytest.param(EQUAL_STEPS, 2, 2 * (40 + 30) / 100, id="all steps cost the same"),
        pytest.param(EQUAL_STEPS, 1, 1.0, id="one at a time"),
        pytest.param(
            CHEAP_WHEN_FEW,
            2,
            (20 + (10 * 1.5 + 30 * 1.0) + (20 * 1.5 + 10 * 1.0)) / (20 + 100 / 2 * 1.5),
            id="cheap steps of few sequences and dear prompts",
        ),
    ],
)
def test_lengths_and_costs_allow_a_gain(costs: StepCosts, batch_size: int, gain: float):
    trace = [ask(number, prompt=10, output=output) for number, output in enumerate([10, 40, 20, 30])]
    assert allowed_gain(trace, batch_size, costs) == pytest.approx(gain)


def test_costs_lie_evenly_between_those_measured():
    costs = StepCosts({2: 1.0, 4: 2.0})
    assert [costs.decode(num_seqs) for num_seqs in (1, 2, 3, 4, 5)] == [1.0, 1.0, 1.5, 2.0, 2.0]


def test_costs_are_those_of_the_device():
    simulation = Simulation()
    costs = measure_costs(StaticBatches(simulation.engine), tuple(range(300, 400)), 6)
    assert list(costs.decode_s) == [1, 2, 4, 6]
    for num_seqs in range(1, 7):
        assert costs.decode(num_seqs) == pytest.approx(20e-3 + num_seqs * 0.1e-3, rel=0.03)
    steps = -(-600 // 256)
    assert costs.prompt_token_s == pytest.approx((steps * 20e-3 + 600 * 0.1e-3) / 600, rel=0.1)


def test_continuous_batching_comes_close_to_the_upper_bound():
    # Long enough that filling and emptying the slots at the ends counts for little.
    trace = make_trace(TraceSpec(num_requests=160, requests_per_s=1000.0, prompt_tokens=(8, 16)))
    continuous = Simulation().continuous(trace)
    static = Simulation().serve(trace, BY_NAME["fixed size, no padding"])
    reached = continuous.tokens_per_s / static.tokens_per_s
    assert reached >= 0.85 * allowed_gain(trace, LIMITS.max_num_seqs, EQUAL_STEPS)
    assert continuous.padding_efficiency is not None and continuous.utilization is not None
    assert continuous.padding_efficiency > 0.99, "only what urgent requests displaced is computed again"
    assert continuous.utilization > 0.9
    assert continuous.latency_p50_s < static.latency_p50_s and continuous.ttft_p50_s < static.ttft_p50_s


def test_a_run_without_step_figures_has_no_efficiency():
    outcome = outcome_of("x", [ask(0)], {0: [1.0] * 8}, None)
    assert outcome.padding_efficiency is None and outcome.tokens_per_s == 8.0


FIXED = FixedSize(3, max_wait_s=1.0)
PRIORITY = Priority(2, max_wait_s=1.0)
BUCKETS = LengthBucketed(2, max_wait_s=1.0, bounds=(64, 128))
MEMORY = MemoryLimited(300, max_batch_size=8, max_wait_s=1.0)
EARLY_AND_LATE = [ask(0), ask(1, 0.5)]
URGENT_LAST = [ask(0), ask(1), ask(2, band=Band.INTERACTIVE), ask(3, band=Band.INTERACTIVE)]
LENGTHS = [ask(0, prompt=10), ask(1, prompt=100), ask(2, prompt=128), ask(3, prompt=200)]
SIZES = [ask(0, prompt=50, output=10), ask(1, prompt=60, output=30), ask(2, prompt=90, output=20), ask(3)]


@pytest.mark.parametrize(
    ("policy", "waiting", "now", "chosen"),
    [
        pytest.param(FIXED, EARLY_AND_LATE, 0.9, [], id="fixed size waits for company"),
        pytest.param(FIXED, EARLY_AND_LATE, 1.0, [0, 1], id="fixed size waits not for ever"),
        pytest.param(FIXED, [ask(number) for number in range(4)], 0.0, [0, 1, 2], id="fixed size takes the oldest"),
        pytest.param(FIXED, [], 5.0, [], id="fixed size of nothing"),
        pytest.param(PRIORITY, URGENT_LAST, 0.5, [2, 3], id="priority puts urgent requests first"),
        pytest.param(PRIORITY, URGENT_LAST, 1.0, [0, 2], id="priority lets the oldest go"),
        pytest.param(BUCKETS, LENGTHS, 0.0, [1, 2], id="bucket holds prompts of similar length"),
        pytest.param(BUCKETS, LENGTHS[3:], 0.5, [], id="bucket waits"),
        pytest.param(BUCKETS, LENGTHS, 1.0, [0], id="bucket of the oldest goes"),
        pytest.param(MEMORY, SIZES, 0.0, [0, 1], id="three of 110 tokens do not fit in 300"),
        pytest.param(MEMORY, SIZES[:2], 0.5, [], id="memory limit waits"),
        pytest.param(MEMORY, SIZES[:2], 1.0, [0, 1], id="memory limit waits not for ever"),
        pytest.param(MEMORY, [ask(0, prompt=400)], 1.0, [0], id="one always goes"),
    ],
)
def test_a_policy_chooses_the_next_batch(policy: Policy, waiting: list[TraceRequest], now: float, chosen: list[int]):
    assert [request.number for request in policy.choose(waiting, now)] == chosen


def test_the_adaptive_size_grows_when_fast_and_halves_when_slow():
    policy = Adaptive(target_s=4.0, max_batch_size=6)
    batch = [ask(number) for number in range(6)]
    fast = [(batch, 1.0, size) for size in (2, 3, 4, 5, 6, 6)]
    # A partial batch says nothing of a larger one.
    for ended, duration_s, expected in (*fast, (batch, 3.5, 6), (batch, 4.5, 3), (batch[:2], 1.0, 3)):
        policy.batch_ended(ended, duration_s)
        assert policy.batch_size == expected
