"""`TimedRunner` under the real engine: a step's time, and output that no history changes."""

import time

import pytest

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.sequence import Sequence
from replicas.protocol import Band, FinishReason, GenerateRequest
from testkit.engine.shadow_runner import IDENTITY, FakeClock, Outcome, World, config, decoders, request
from testkit.engine.timed_runner import StepShape, StepTimes, TimedRunner, TimedStep, shape_of

VOCABULARY, EOS = 4096, 2
STEP_TIMES = StepTimes(base_s=5e-3, per_decode_s=1e-3, per_prefill_token_s=1e-4, per_context_token_s=1e-5)
INSTANT = StepTimes(0.0, 0.0, 0.0)


class Recorder:
    """Passes steps on and remembers their shapes."""

    def __init__(self, runner: TimedRunner) -> None:
        self._runner = runner
        self.shapes: list[StepShape] = []

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        self.shapes.append(shape_of(batch))
        step = self._runner.launch(batch)
        results = step.collect()
        assert len(results) == len(batch.items)
        for item, result in zip(batch.items, results, strict=True):
            assert (result.token_id is not None) == item.samples
        return step


def run(requests: list[GenerateRequest], engine_config: EngineConfig) -> tuple[dict[str, Outcome], Engine, Recorder]:
    recorder = Recorder(TimedRunner(INSTANT, VOCABULARY, EOS))
    world = World(engine_config)
    world.engine = Engine(engine_config, recorder, decoders, IDENTITY)
    for each in requests:
        world.add(each)
    world.run()
    return world.outcomes, world.engine, recorder


def tokens_alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    outcomes, _, _ = run([request("alone", prompt, max_tokens, ignore_eos=True)], config())
    return outcomes["alone"].token_ids


def test_a_step_takes_its_time_and_no_more():
    runner = TimedRunner(STEP_TIMES, VOCABULARY, EOS)
    decoding = Sequence(request("a", (30, 31, 32, 33)), 0.0, None, 0)
    prefilling = Sequence(request("b", tuple(range(20, 60))), 0.0, None, 1)
    batch = ScheduledBatch((ScheduledSequence.of(decoding, 3, 1), ScheduledSequence.of(prefilling, 0, 20)))
    assert shape_of(batch) == StepShape(num_decodes=1, num_prefill_tokens=20, num_context_tokens=24)
    expected_s = 5e-3 + 1e-3 + 20e-4 + 24e-5
    durations = []
    for _ in range(20):
        started_s, cpu_s = time.perf_counter(), time.thread_time()
        runner.launch(batch).collect()
        durations.append((time.perf_counter() - started_s, time.thread_time() - cpu_s))
    assert min(taken for taken, _ in durations) == pytest.approx(expected_s, rel=0.05)
    assert all(taken >= expected_s for taken, _ in durations)
    assert sum(cpu for _, cpu in durations) < 0.1 * len(durations) * expected_s, "it burns the processor"


def test_output_is_equal_despite_chunks_and_preemption():
    prompts = {f"r{number}": tuple(16 + (number * 37 + i * 11) % 500 for i in range(20)) for number in range(8)}
    requests = [request(name, prompt, 30, ignore_eos=True) for name, prompt in prompts.items()]
    outcomes, engine, recorder = run(requests, config(num_blocks=40))
    assert any(metric.name == "vllm:num_preemptions" and metric.value > 0 for metric in engine.metrics().metrics)
    assert any(shape.num_decodes and shape.num_prefill_tokens for shape in recorder.shapes)
    for name, prompt in prompts.items():
        assert outcomes[name].token_ids == tokens_alone(prompt, 30)
        assert outcomes[name].finish_reason is FinishReason.LENGTH


def test_a_sequence_resumed_elsewhere_has_the_same_tokens():
    prompt = (50, 60, 70)
    whole = tokens_alone(prompt, 40)
    assert tokens_alone((*prompt, *whole[:15]), 25) == whole[15:]
    assert len(set(whole)) > 20 and min(whole) >= 16 and max(whole) < VOCABULARY


def test_a_hidden_length_survives_resumption():
    prompt = tuple(range(20, 30))
    outcomes, _, _ = run(
        [request("whole", prompt, 60, seed=10 + 25), request("kept", prompt, 60, seed=10 + 25, ignore_eos=True)],
        config(eos_token_ids=frozenset({EOS})),
    )
    ends = {name: (outcome.finish_reason, len(outcome.token_ids)) for name, outcome in outcomes.items()}
    assert ends == {"whole": (FinishReason.STOP, 25), "kept": (FinishReason.LENGTH, 60)}
    assert outcomes["whole"].token_ids[-1] == EOS
    emitted = tuple(outcomes["whole"].token_ids[:10])
    resumed, _, _ = run([request("rest", (*prompt, *emitted), 50, seed=35)], config(eos_token_ids=frozenset({EOS})))
    assert resumed["rest"].token_ids == outcomes["whole"].token_ids[10:]


def test_scoring_samples_nothing_and_gives_log_probabilities():
    outcomes, _, _ = run(
        [
            request("score", tuple(range(20, 60)), 0, prompt_logprobs=0),
            request("sample", (20, 21), 3, logprobs=0, band=Band.INTERACTIVE),
        ],
        config(),
    )
    assert outcomes["score"].token_ids == []
    assert [p.chosen.token_id for p in outcomes["score"].prompt_logprobs] == list(range(21, 60))
    assert len(outcomes["sample"].token_ids) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_output_is_the_same_a_step_ahead(async_scheduling: bool):
    requests = [request(f"r{number}", tuple(range(20 + number, 40)), 30, seed=45) for number in range(8)]
    limits = config(eos_token_ids=frozenset({EOS}), async_scheduling=async_scheduling)
    outcomes, _, _ = run(requests, limits)
    for asked in requests:
        assert (
            outcomes[asked.request_id].token_ids
            == run([asked], config(eos_token_ids=frozenset({EOS})))[0][asked.request_id].token_ids
        )


def simulated_runner() -> tuple[TimedRunner, FakeClock]:
    """Return a runner whose steps take a second, and the clock that its sleep moves."""
    clock = FakeClock()

    def sleep(duration_s: float) -> None:
        clock.now += duration_s + 1e-3

    return TimedRunner(StepTimes(1.0, 0.0, 0.0), VOCABULARY, EOS, lambda: clock.now, sleep), clock


def test_steps_launched_together_take_their_time_in_turn():
    runner, clock = simulated_runner()
    start_s = clock.now
    batch = ScheduledBatch((ScheduledSequence.of(Sequence(request("a", (30, 31)), 0.0, None, 0), 0, 2),))
    ends = []
    for step in [runner.launch(batch), runner.launch(batch)]:
        step.collect()
        ends.append(clock.now - start_s)
    assert ends == pytest.approx([1.0, 2.0], abs=0.01)


@pytest.mark.parametrize(("async_scheduling", "expected_s"), [(False, 20 * 1.3), (True, 20 * 1.0)])
def test_a_step_ahead_the_hosts_work_hides_behind_the_devices(async_scheduling: bool, expected_s: float):
    runner, clock = simulated_runner()
    start_s = clock.now
    engine = Engine(config(async_scheduling=async_scheduling), runner, decoders, IDENTITY)
    engine.add(request("r", (30, 31), 20, ignore_eos=True))
    while engine.has_work:
        engine.step()
        clock.now += 0.3  # The host spends this time between two steps.
    assert clock.now - start_s == pytest.approx(expected_s, abs=0.7)
