"""Arrays of running sequences: the same steps, deltas and blocks as without them, for work that follows the changes."""

import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import FrameType

import numpy as np
import pytest

from replicas.engine.batch import LaunchedStep, ScheduledBatch, StepResults
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.protocol import Band, TokenDelta
from testkit.engine.plain_scheduler import PlainEngine
from testkit.engine.random_worlds import play, random_config
from testkit.engine.shadow_runner import IDENTITY, World, config, decoders, prompt, request
from tests.seeds import Seeds
from tests.unit.engine.test_async_scheduling import EOS, PipelinedRunner, anything

pytestmark = pytest.mark.rotated

WINDOWS = [(None,), (None,), (6, None), (3, 9, None)]


class RecordingRunner(PipelinedRunner):
    """Runner that records every batch with its items' blocks and state slots."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.events: list[object] = []

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        for item in batch.items:
            sequence = item.sequence
            tables = (tuple(sequence.block_table), *map(tuple, sequence.more_tables))
            facts = (item.start, item.num_tokens, item.samples, item.num_recomputed_tokens, item.preemption, item.state)
            self.events.append((sequence.request_id, facts, tables, sequence.num_held_steps))
        self.events.append((batch.decoding_bands, batch.num_tokens, batch.is_constrained))
        return super().launch(batch)


class RecordingWorld(World):
    """World that records every batch, delta and report of its engine."""

    runner: RecordingRunner

    def __init__(self, config: EngineConfig, make_engine: type[Engine]) -> None:
        self.make_engine = make_engine
        self.num_held = 0
        super().__init__(config, step_s=0.1, make_runner=RecordingRunner)

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            deltas = self.engine.step()
            num_held = self.engine._scheduler.num_held
            self.num_held += num_held
            self.runner.events.append(num_held)
            self.runner.events += [repr(delta) for delta in deltas]
            load = self.engine.stats()
            by_ingress = tuple(sorted(load.by_ingress, key=lambda share: share.ingress_id))
            self.runner.events.append(replace(load, by_ingress=by_ingress))
            self.read(deltas)

    def read(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.outcomes[delta.request_id].read(delta)
        self.num_steps += 1


def random_world_config(rng: random.Random) -> EngineConfig:
    """Return limits of a few slots and blocks; now and then with room, and targets that every stream exceeds."""
    if rng.random() < 0.15:
        return config(num_blocks=300, max_model_len=90, tpot_targets_s=(0.05, 0.05, None), eos_token_ids=EOS)
    windows = rng.choice(WINDOWS)
    num_state_slots = rng.randint(3, 14) if rng.random() < 0.2 else 0
    made = random_config(rng, windows=windows, num_state_slots=num_state_slots, eos_token_ids=EOS)
    return replace(made, async_scheduling=rng.random() < 0.6)


def played(seed: int, make_engine: type[Engine]) -> RecordingWorld:
    rng = random.Random(seed)
    world = RecordingWorld(random_world_config(rng), make_engine)
    world.runner.rng, world.runner.failure_share = random.Random(seed), rng.choice([0.0, 0.0, 0.1])
    for _ in play(rng, world, anything):
        pass
    return world


def served(engine: Engine) -> dict[tuple[str, Band], int]:
    return {(part.tenant, part.band): part.tokens for part in engine.served_tokens()}


@pytest.mark.random_worlds(300, per_call=50)
def test_random_worlds_are_those_of_the_plain_scheduler(seeds: Seeds) -> None:
    check_worlds(seeds)


@pytest.mark.deep
@pytest.mark.random_worlds(3000, per_call=250)
def test_many_random_worlds_are_those_of_the_plain_scheduler(seeds: Seeds) -> None:
    check_worlds(seeds)


def check_worlds(seeds: Seeds) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world, plain = played(seed, Engine), played(seed, PlainEngine)
        for number, (event, expected) in enumerate(zip(world.runner.events, plain.runner.events, strict=True)):
            assert event == expected, f"event {number} of world {seed}"
        metrics, expected_metrics = world.engine.metrics(), plain.engine.metrics()
        assert metrics.metrics == expected_metrics.metrics
        for histogram, other in zip(metrics.histograms, expected_metrics.histograms, strict=True):
            assert (histogram.name, histogram.counts) == (other.name, other.counts)
            assert histogram.sum == pytest.approx(other.sum)
        assert served(world.engine) == served(plain.engine)
        counts["preempted"] += world.engine._scheduler.num_preemptions
        counts["windows"] += len(world.config.windows) > 1
        counts["states"] += world.config.num_state_slots > 0
        counts["held"] += world.num_held
        counts["constrained"] += len(world.constraints)
    if seeds.are_many:
        assert all(counts[what] > 2 for what in ("preempted", "windows", "states", "held", "constrained")), counts


@dataclass
class ArrayRunner:
    """Runner that reads batches as arrays, and gives each item that samples the same token."""

    results: StepResults | None = None

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        return ArrayRunner(StepResults(np.where(batch.columns.samples, 7, -1), {}))

    def sample(self) -> None:
        pass

    def collect(self) -> StepResults:
        assert self.results is not None
        return self.results


def num_calls(num_sequences: int, num_stopping: int = 0, num_steps: int = 30) -> Counter[str]:
    """Return the functions of the engine that steps of decodes call, apart from those that look for stop strings.

    `num_stopping` more sequences have stop strings.
    """
    num_all = num_sequences + num_stopping
    limits = config(num_blocks=4096, max_num_seqs=num_all, max_num_batched_tokens=16 * num_all, block_size=64,
                    max_model_len=128, async_scheduling=True, tpot_targets_s=(0.1, None, None))  # fmt: skip
    engine = Engine(limits, ArrayRunner(), decoders, IDENTITY)
    for number in range(num_all):
        stop = ("xyz",) if number >= num_sequences else ()
        engine.add(
            request(f"r{number}", prompt(7 + number % 9), 100, Band(number % 2), tenant=f"t{number % 3}", stop=stop)
        )
    while len(engine.step()) < num_all:
        pass
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/replicas/engine/" in code.co_filename:
            calls[code.co_qualname] += 1

    for _ in range(num_steps):
        sys.setprofile(count)
        try:
            deltas = engine.step()
            engine.stats()
        finally:
            sys.setprofile(None)
        assert len(deltas) == num_all
    assert calls.pop("Detokenizer.push", 0) == num_stopping * num_steps
    return calls


def test_the_work_of_a_step_does_not_grow_with_its_decodes() -> None:
    assert num_calls(256) == num_calls(16)


def test_the_work_of_a_step_grows_with_the_sequences_that_have_stop_strings() -> None:
    fewer, more = (num_calls(16, num_stopping).total() for num_stopping in (8, 16))
    assert num_calls(128, 16).total() == more > fewer
