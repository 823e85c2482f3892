"""Blocks of layers with a window: given back behind it, cached, shared and bounded, with the same answers."""

import random
from dataclasses import replace

import pytest

from replicas.engine.batch import ScheduledSequence
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig, EngineLimits, sequence_blocks
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.protocol import Band, SequenceBlocks
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import ShadowRunner, World, config, continuation, prompt, request
from tests.seeds import Seeds
from tests.unit.engine.test_async_scheduling import EOS, PipelinedWorld, check_outcomes
from tests.unit.engine.test_state_slots import RepeatingRunner, hits

pytestmark = pytest.mark.rotated

WINDOWS: tuple[tuple[int | None, ...], ...] = ((1, None), (6, None), (6, 6, None), (3, 9, None), (5, None, None), (7,))
NUM_OPERATIONS = 2_500


def windowed(**changes: object) -> EngineConfig:
    return config(**{"windows": (10, None), "num_blocks": 64, "max_num_batched_tokens": 16, **changes})


def random_windowed(rng: random.Random, **changes: object) -> EngineConfig:
    num_state_slots = rng.randint(3, 14) if rng.random() < 0.3 else 0
    return random_config(rng, windows=rng.choice(WINDOWS), num_state_slots=num_state_slots, **changes)


@pytest.mark.random_worlds(450, per_call=50)
def test_random_worlds_read_no_stale_block_and_give_back_all(seeds: Seeds) -> None:
    num_preemptions = num_hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_windowed(rng), make_runner=RepeatingRunner if rng.random() < 0.5 else ShadowRunner)
        for asked, outcome, is_whole in play(rng, world, random_request):
            expected = continuation(asked.prompt_token_ids, asked.params.max_tokens)
            assert tuple(outcome.token_ids) == (expected if is_whole else expected[: len(outcome.token_ids)])
            num_hits += outcome.last is not None and outcome.last.usage.cached_tokens > 0
        num_preemptions += world.engine._scheduler.num_preemptions
    if seeds.are_many:
        assert num_preemptions > 5 and num_hits > 5, "the worlds do not reach what they test"


@pytest.mark.random_worlds(225, per_call=25)
def test_steps_ahead_on_a_device_that_fails_now_and_then_change_no_answer(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(random_windowed(rng, eos_token_ids=EOS))
        world.runner.rng, world.runner.failure_share = rng, rng.choice([0.0, 0.2])
        check_outcomes(rng, world)


class Operations:
    """Random operations on blocks, windows and slots, in the order in which an engine may call them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        windows, max_model_len = rng.choice(WINDOWS), rng.randint(10, 60)
        limits = EngineLimits(rng.choice([1, 2, 4]), rng.randint(1, 6), rng.randint(9, 12))
        longest = sequence_blocks(limits, windows, is_asynchronous=True).num_blocks(max_model_len)
        self.config = config(
            windows=windows, block_size=limits.block_size, num_blocks=int(rng.uniform(1, 2.5) * longest),
            max_model_len=max_model_len, max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            enable_prefix_caching=rng.random() < 0.9, async_scheduling=rng.random() < 0.5,
            num_state_slots=rng.randint(3, 14) if rng.random() < 0.4 else 0,
        )  # fmt: skip
        self.blocks = BlockManager(self.config)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.steps: list[list[ScheduledSequence]] = []
        self.num_added = self.num_finished = self.num_hits = self.most_running = 0

    def play(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.rng.choices((self.add, self.step, self.collect, self.preempt), (2, 20, 1, 1))[0]()
            self.blocks.check_invariants(self.running)
            self.most_running = max(self.most_running, len(self.running))
        for _ in range(100 * num_operations):
            if not self.running and not self.waiting:
                break
            self.admit()
            self.launch(self.running[:1])
            self.collect()
        assert self.num_finished == self.num_added, "a sequence starves"
        self.blocks.check_invariants([])
        assert self.blocks.num_free_blocks == self.config.num_blocks
        assert self.blocks.states.num_free_slots == self.config.num_state_slots

    def add(self) -> None:
        length = self.rng.randint(1, self.config.max_model_len - 1)
        max_tokens = self.rng.randint(1, self.config.max_model_len - length)
        asked = request(str(self.num_added), tuple(self.rng.choices([1, 2], [19, 1], k=length)), max_tokens)
        self.waiting.append(Sequence(asked, 0.0, None, self.num_added))
        self.num_added += 1

    def admit(self) -> None:
        if not self.waiting or len(self.running) == self.config.num_slots:
            return
        sequence = self.waiting[0]
        if not self.blocks.states.has_room(()):
            return
        if self.running and self.blocks.shortfall(sequence, sequence.num_tokens) > 0:
            return
        self.blocks.allocate(sequence)
        self.num_hits += sequence.num_computed_tokens > 0
        sequence.status = SequenceStatus.RUNNING
        self.running.append(self.waiting.pop(0))

    def step(self) -> None:
        """Admit sequences, launch a step of some, and collect the one before; its failure revokes the new one."""
        for _ in range(self.rng.randint(0, 2)):
            self.admit()
        self.launch(self.rng.sample(self.running, self.rng.randint(0, len(self.running))))
        if len(self.steps) > 1 and self.rng.random() < 0.1:
            self.revoke()
        if len(self.steps) > self.config.async_scheduling:
            self.collect()

    def launch(self, sequences: list[Sequence]) -> None:
        """Launch a step of sequences, as far as they have tokens to compute; preempt the last for their blocks."""
        for sequence in sequences:
            while sequence in self.running and not self.blocks.can_grow(sequence, sequence.num_tokens):
                self.preempt()
            if sequence in self.running:
                self.blocks.grow(sequence, sequence.num_tokens)
        step = []
        for sequence in sequences:
            if sequence in self.running and sequence.num_uncomputed_tokens:
                most = min(self.config.max_num_batched_tokens, sequence.num_uncomputed_tokens)
                start, num_tokens = sequence.num_scheduled_tokens, self.rng.randint(1, most)
                state = self.blocks.states.move(sequence, start, start + num_tokens)
                step.append(ScheduledSequence.of(sequence, start, num_tokens, state))
                sequence.launched(num_tokens, step[-1].samples)
        self.steps.append(step)

    def collect(self) -> None:
        for item in self.steps.pop(0) if self.steps else ():
            sequence, before = item.sequence, item.sequence.num_computed_tokens
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if item.holds_blocks:
                sequence.num_in_flight_tokens -= item.num_tokens
                sequence.num_computed_tokens += item.num_tokens
                self.blocks.computed(sequence, before)
            if item.samples:
                sequence.append(self.rng.choice([1, 2]))
                if not sequence.can_sample:
                    self.finish(sequence)

    def revoke(self) -> None:
        for item in self.steps.pop():
            sequence = item.sequence
            sequence.num_placeholder_tokens -= item.samples
            if item.holds_blocks:
                sequence.num_in_flight_tokens -= item.num_tokens
                self.blocks.states.revoked(sequence)

    def preempt(self) -> None:
        if self.running:
            sequence = self.running.pop()
            self.blocks.free(sequence)
            sequence.status = SequenceStatus.WAITING
            sequence.num_preemptions += 1
            self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.blocks.free(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.num_finished += 1


@pytest.mark.random_worlds(48, per_call=8)
def test_random_operations_keep_the_invariants_and_starve_nobody(seeds: Seeds) -> None:
    worlds = []
    for seed in seeds:
        worlds.append(Operations(random.Random(seed)))
        worlds[-1].play(NUM_OPERATIONS)
    if seeds.are_many:
        assert sum(world.num_hits for world in worlds) > 100 and max(world.most_running for world in worlds) > 2


def blocks_of(world: World) -> list[int]:
    """Return the number of blocks that each running sequence holds."""
    return [sequence.num_blocks for sequence in world.engine._scheduler.running]


@pytest.mark.parametrize("make_world", [World, PipelinedWorld])
def test_a_table_with_a_window_holds_the_window_and_the_next_steps(make_world: type[World]) -> None:
    world = make_world(windowed(num_blocks=80, windows=(10, 10), max_model_len=128))
    world.add(request("r", prompt(100), max_tokens=28))
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, *blocks_of(world), 0)
        world.engine.check_invariants()
    rule = world.config.sequence_blocks
    assert most <= rule.num_blocks(128) < 2 * 25
    assert world.outcomes["r"].token_ids == list(continuation(prompt(100), 28))


def test_sequences_whose_whole_length_would_not_fit_run_together() -> None:
    world = World(windowed(windows=(6, 6, 6, None), num_blocks=110, max_model_len=100, max_num_seqs=2))
    world.add(*(request(name, prompt(60, first), max_tokens=40) for name, first in (("a", 1), ("b", 2))))
    world.step(20)
    assert world.engine.stats().num_running == 2
    world.run()
    assert world.engine._scheduler.num_preemptions == 0 and 2 * 4 * 25 > 110


def num_hit_tokens(world: World, prompt: tuple[int, ...]) -> int:
    """Return the number of tokens that a prompt finds cached."""
    blocks, sequence = world.engine._scheduler.blocks, Sequence(request("hit", prompt, 1), 0.0, None, 1)
    blocks.allocate(sequence)
    num_hits = sequence.num_computed_tokens
    if num_hits == 48:
        assert sequence.block_table[:9] == [0] * 9 and all(sequence.block_table[9:]) and all(sequence.more_tables[0])
    blocks.free(sequence)
    return num_hits


def test_a_hit_needs_only_the_blocks_that_the_next_token_sees() -> None:
    for length_of_other, expected in ((1, 28), (34, 0)):
        world = World(windowed(num_blocks=34, max_model_len=60))
        world.run(request("a", prompt(50), max_tokens=1))
        # Blocks behind the window were given back first, so others take them first.
        world.run(request("b", prompt(length_of_other, 60), max_tokens=1))
        assert [num_hit_tokens(world, prompt(length)) for length in (50, 31)] == [48, expected]


def test_a_prompt_waits_for_a_window_that_its_neighbour_computes() -> None:
    world = World(windowed())
    world.run(request("a", prompt(50), max_tokens=1), request("b", prompt(50), max_tokens=1))
    assert hits(world, "a", "b") == [0, 48]


def test_the_next_turn_of_a_preempted_sequence_resumes_at_its_window() -> None:
    world = World(windowed(max_num_seqs=1))
    world.add(request("a", prompt(30), max_tokens=30))
    world.step(12)
    computed = world.engine._scheduler.running[0].num_computed_tokens
    world.run(request("urgent", (7, 8), band=Band.INTERACTIVE))
    resumed = next(item for batch in world.runner.batches for item in batch.items if item.preemption == 1)
    assert resumed.start == computed - computed % 4


def test_the_stats_count_the_blocks_of_all_tables() -> None:
    world = World(windowed())
    world.add(request("a", prompt(9), max_tokens=5))
    world.step()
    stats = world.engine.stats()
    assert stats.num_held_blocks_by_band == (0, 6, 0) and stats.num_free_blocks == 58
    assert (stats.num_whole_tables, stats.most_window_blocks) == (1, (8,))
    assert stats.num_tokens(10) == 20 and stats.num_tokens(30) == 4 * 22


def test_tokens_and_blocks_of_a_sequence_follow_from_each_other() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        most = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        rule = SequenceBlocks(rng.choice([1, 4, 16]), rng.randint(not most, 2), most)
        num_blocks = rng.randint(0, 60)
        num_tokens = rule.num_tokens(num_blocks)
        assert rule.num_blocks(num_tokens) <= num_blocks
        assert num_tokens > 10**6 or rule.num_blocks(num_tokens + 1) > num_blocks


def test_a_length_that_could_never_fit_is_refused() -> None:
    assert windowed(num_blocks=8 + 32).max_model_len == 128
    with pytest.raises(ValueError, match=r"max_model_len \(128\) exceeds .* 39 blocks x 4 tokens in 2 tables = 124"):
        windowed(num_blocks=8 + 31)
    with pytest.raises(ValueError, match="tables without a window must be the last ones"):
        replace(windowed(), windows=(None, 10))
