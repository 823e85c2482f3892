"""Messages of steps are plain numbers, and give the same tokens and log probabilities on any runner of the model."""

import pickle
import random
from dataclasses import dataclass

import pytest

from bench.gpu.model_checks import check_replay
from replicas.engine.engine import Engine
from replicas.model.cuda_graphs.graphs import PlannedAttention
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.planner import StepMessage
from replicas.model.runner import RunningStep, TorchModelRunner
from replicas.model.sampling.masks import MaskMessage
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, engine_over, load, make_runner, num_preemptions, run
from testkit.model.planned_gather import PlannedGather
from testkit.model.recorded_steps import RecordedStep, num_changed_steps, record
from tests.model.cuda_graphs.test_steps_ahead import LOOKING_BACK, PARAMS, TIGHT, check_same, requests_with

pytestmark = pytest.mark.rotated

EVERY_KIND = (
    *PARAMS,
    LOOKING_BACK,
    SamplingParams(max_tokens=14, seed=3, grammar="9 30"),
    SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, grammar="3 6"),
    SamplingParams(max_tokens=12, seed=5, top_k=4, allowed_token_ids=(9, 70, 71, 72), bad_words=((70,), (71, 72))),
    SamplingParams(max_tokens=12, temperature=0.0, presence_penalty=0.6, logprobs=1),
)


@dataclass(frozen=True)
class Recording:
    """Run of sequences of every kind, twice: the second time with prefix hits."""

    loaded: LoadedModel
    planned: PlannedAttention | None
    counts_on_device: bool
    steps: list[RecordedStep]
    engine: Engine

    def messages(self) -> list[StepMessage]:
        return [pickle.loads(step.message) for step in self.steps]

    def second_runner(self) -> TorchModelRunner:
        return make_runner(self.loaded, TIGHT, planned=self.planned, counts_on_device=self.counts_on_device)


def every_kind() -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{number}", requests_with()[number % len(PARAMS)].prompt_token_ids, params)
        for number, params in enumerate(EVERY_KIND)
    ]


@pytest.fixture(
    scope="module",
    params=[
        (PlannedGather, True),
        pytest.param((PlannedGather, False), marks=pytest.mark.deep),
        pytest.param((None, True), marks=pytest.mark.deep),
        (None, False),
    ],
    ids=["padded-counts", "padded", "eager-counts", "eager"],
)
def recording(request: pytest.FixtureRequest) -> Recording:
    planned, counts_on_device = request.param
    loaded = load(cached_checkpoint("llama", with_tokenizer=True))
    expected = run(build_engine(loaded), every_kind())
    runner = make_runner(loaded, TIGHT, planned=planned, counts_on_device=counts_on_device)
    steps = record(runner)
    engine = engine_over(runner, loaded, TIGHT, is_ahead=True)
    for _ in range(2):
        check_same(run(engine, every_kind()), expected)
    return Recording(loaded, planned, counts_on_device, steps, engine)


def test_a_second_runner_computes_the_same_bits(recording: Recording) -> None:
    assert num_changed_steps(recording.second_runner(), recording.steps) == 0


def test_the_recorded_steps_are_of_every_kind(recording: Recording) -> None:
    messages = recording.messages()
    flat = [one for message in messages for one in message.flat]
    sampling = [message.sampling for message in messages if message.sampling is not None]
    changes = [plan.changes for plan in sampling]
    assert num_preemptions(recording.engine) > 0
    assert sum(message.padded is not None for message in messages) > 50 or recording.planned is None
    assert any(one.targets for one in flat) and any(not plan.scored for plan in sampling)
    assert any(one.inputs.has_placeholders for one in flat) or recording.planned is not None
    assert any(message.padded and message.padded.has_placeholders for message in messages) or not recording.planned
    assert any(plan.full for plan in sampling) and any(plan.truncated for plan in sampling)
    assert any(one.penalties for one in changes) == recording.counts_on_device
    assert any(one.repetition for one in changes) != recording.counts_on_device
    assert any(one.added for one in changes) and any(one.forbidden for one in changes)
    assert sum(pickle.loads(step.masks) is not None for step in recording.steps if step.masks is not None) > 10


def test_messages_refer_to_no_sequence_and_no_tensor(recording: Recording) -> None:
    for step in recording.steps:
        for pickled in (step.message, step.masks or b""):
            assert b"replicas.engine.sequence" not in pickled and b"torch" not in pickled


def test_a_replay_with_other_numbers_is_found(recording: Recording) -> None:
    index = next(i for i, message in enumerate(recording.messages()) if message.sampling is not None)
    message = recording.messages()[index]
    inputs = message.flat[0].inputs.input_ids if message.padded is None else message.padded.words
    message.words[inputs.start] += 1
    changed = RecordedStep(pickle.dumps(message), recording.steps[index].results, recording.steps[index].masks)
    steps = [*recording.steps[:index], changed, *recording.steps[index + 1 :]]
    assert num_changed_steps(recording.second_runner(), steps) > 0


class FailingRunner:
    """Failures of a runner's steps at random: before the forward pass, after it, and in the sampling."""

    def __init__(self, runner: TorchModelRunner, rng: random.Random) -> None:
        self._run, self._sample, self._rng = runner.run, runner.sample, rng
        self._num_good = 0
        self.num_failures = 0
        runner.run, runner.sample = self.run, self.sample  # type: ignore[method-assign]

    def run(self, message: StepMessage) -> RunningStep:
        self._fail()
        step = self._run(message)
        self._fail()
        return step

    def sample(self, step: RunningStep, masks: MaskMessage | None = None) -> None:
        self._fail()
        self._sample(step, masks)
        self._num_good += 1

    def _fail(self) -> None:
        """Raise an error now and then, and never while a failed step is repeated in parts."""
        if self._num_good > 2 * TIGHT.max_num_seqs and self._rng.random() < 0.2:
            self._num_good = 0
            self.num_failures += 1
            raise RuntimeError("a launch has failed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("planned", [None, PlannedGather], ids=["eager", "padded"])
def test_a_step_that_could_not_run_is_planned_anew(planned: PlannedAttention | None) -> None:
    loaded = load(cached_checkpoint("llama", with_tokenizer=True))
    expected = run(build_engine(loaded), every_kind())
    runner = make_runner(loaded, TIGHT, planned=planned, counts_on_device=True)
    failing = FailingRunner(runner, random.Random(1))
    engine = engine_over(runner, loaded, TIGHT, is_ahead=True)
    for _ in range(4):
        check_same(run(engine, every_kind()), expected)
    assert failing.num_failures >= 6


def test_the_check_for_gpus_runs_on_the_cpu() -> None:
    check = check_replay("llama", "cpu")
    assert check.passed, check.detail
