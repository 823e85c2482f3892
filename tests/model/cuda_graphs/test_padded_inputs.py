"""A padded pass reads the batch's tokens, positions and slots on the device, whatever steps came before."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replicas.engine.batch import (
    BatchColumns,
    ItemResult,
    LaunchedStep,
    ScheduledBatch,
    ScheduledSequence,
    StateColumns,
    StateMove,
)
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.engine.sequence_table import SequenceTable
from replicas.model.attention.plan import StatePlan, state_fields
from replicas.model.batch.inputs import NO_LAST_ROWS, table_of, wants_prompt_logprobs
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.buffers import StepBuffers
from replicas.model.cuda_graphs.graphs import step_shapes
from replicas.model.cuda_graphs.padding import StepPadding, StepShape
from replicas.model.planner import PlannedStep, StepMessage, StepPlanner
from testkit.engine.random_worlds import random_config
from testkit.engine.shadow_runner import VOCABULARY, World, prompt, request
from tests.seeds import Seeds
from tests.unit.engine.test_async_scheduling import EOS, PipelinedRunner, PipelinedWorld, check_outcomes

CPU = torch.device("cpu")
FACTORS = (2, 1, 3)


class PaddingRunner(PipelinedRunner):
    """Shadow runner that also plans padded passes, writes their numbers to buffers, and checks what these hold."""

    def prepare(self, config: EngineConfig) -> None:
        """Make the planner and the buffers for an engine of this configuration."""
        self._factors = FACTORS[: len(config.windows)]
        has_states = config.num_state_slots > 0
        shapes = step_shapes(config.max_num_seqs, config.max_num_batched_tokens, has_states=has_states)
        max_blocks = -(-config.max_model_len // config.block_size) + 1
        self._buffers = StepBuffers(shapes, max_blocks, config.block_size, CPU, len(self._factors))
        loaded: Any = SimpleNamespace(eos_token_ids=frozenset(), vocab_size=VOCABULARY, is_batch_invariant=False)
        groups = [SimpleNamespace(layers_per_column=factor) for factor in self._factors]
        cache: Any = SimpleNamespace(block_size=config.block_size, groups=groups)
        self._planner = StepPlanner(loaded, cache, StepPadding(shapes, max_blocks, self._factors), None)
        self._planned: PlannedStep | None = None
        self._last_tokens = no_tokens(CPU)
        self.num_padded = self.num_advances = 0

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        with self._planner.running():
            self._planned = self._planner.plan(batch)
            if self._planned.message.padded is not None:
                self._check(self._planned.message, batch)
            return super().launch(batch)

    def sampled(self, batch: ScheduledBatch, results: list[ItemResult]) -> None:
        super().sampled(batch, results)
        assert self._planned is not None and self._planned.batch is batch
        sequences = self._planned.sampling.sequences
        self._last_tokens = torch.tensor([self._sampled[sequence] for sequence in sequences], dtype=torch.int64)

    def _check(self, message: StepMessage, batch: ScheduledBatch) -> None:
        padded, size = message.padded, self._block_size
        assert padded is not None
        self._buffers.load(padded, DeviceBuffer.of(message.words, self._last_tokens), message.num_new_blocks)
        inputs = self._buffers.inputs(padded.shape)
        items = [item for item in batch.items if not wants_prompt_logprobs(item)]
        token_ids = [token_id for item in items for token_id in self._known(item)[item.start : item.end]]
        places = [(item.sequence, position) for item in items for position in range(item.start, item.end)]
        num_tokens = len(places)
        assert inputs.input_ids[0, :num_tokens].tolist() == token_ids
        assert inputs.position_ids[0, :num_tokens].tolist() == [position for _, position in places]
        for number, (group, factor) in enumerate(zip(inputs.groups, self._factors, strict=True)):
            tables = [table_of(sequence, number) for sequence, _ in places]
            blocks = [table[position // size] * factor for table, (_, position) in zip(tables, places, strict=True)]
            slots = [block * size + position % size for block, (_, position) in zip(blocks, places, strict=True)]
            assert group.slots[:num_tokens].tolist() == slots
            assert (group.slots[num_tokens:] < size).all(), "the padding writes to the scratch block"
        if inputs.states is not None:
            self._check_states(inputs.states, items, num_tokens)
        self.num_padded += 1
        self.num_advances += len(padded.words) < padded.shape.num_words

    def _check_states(self, plan: StatePlan, items: list[ScheduledSequence], num_tokens: int) -> None:
        chunks = [tuple(chunk[:-1]) for chunk in plan.chunks.tolist() if chunk[2] > 0]
        first_rows = accumulate((item.num_tokens for item in items), initial=0)
        expected = {
            (row, item.start, item.num_tokens, *state_fields(item.state))
            for row, item in zip(first_rows, items, strict=False)
        }
        assert {chunk for chunk in chunks if chunk[0] < num_tokens} == expected
        assert all(not any(chunk[3:]) and chunk[1] == 0 for chunk in chunks if chunk[0] >= num_tokens)


class PaddingWorld(PipelinedWorld):
    runner: PaddingRunner
    runner_type = PaddingRunner


@pytest.mark.parametrize(("windows", "has_states"), [((None,), False), ((7, None), False), ((None,), True)])
@pytest.mark.random_worlds(120, per_call=15)
def test_padded_inputs_are_those_of_the_batch(seeds: Seeds, windows: tuple[int | None, ...], has_states: bool) -> None:
    num_padded = num_advances = 0
    for seed in seeds:
        rng = random.Random(seed)
        num_state_slots = rng.randint(3, 24) if has_states else 0
        config = random_config(rng, eos_token_ids=EOS, windows=windows, num_state_slots=num_state_slots)
        is_ahead = rng.random() < 0.7
        world = PaddingWorld(config) if is_ahead else World(config, make_runner=PaddingRunner)
        runner = world.runner
        assert isinstance(runner, PaddingRunner)
        runner.prepare(config)
        runner.rng, runner.failure_share = rng, rng.choice([0.0, 0.1]) if is_ahead else 0.0
        check_outcomes(rng, world)
        num_padded += runner.num_padded
        num_advances += runner.num_advances
    if seeds.are_many:
        assert num_padded > 200 and num_advances > 10, "the worlds do not reach what they test"


class Decodes:
    """Three sequences that decode, with the planner of their padded passes."""

    def __init__(self) -> None:
        self.table = SequenceTable(4)
        self.sequences = [Sequence(request(f"{number}", prompt(9), 40), 0.0, None, number) for number in range(3)]
        for sequence in self.sequences:
            sequence.block_table = [1, 2]
            self.table.enter(sequence)
            sequence.launched(8, samples=False)
        self.padding = StepPadding(step_shapes(4, 16), 4)
        self.last_rows = NO_LAST_ROWS

    def columns(self) -> BatchColumns:
        rows = self.table.rows(self.sequences)
        return self.table.columns(self.sequences, rows, np.ones(3, np.int64), 3, 3)

    def is_advance(self, columns: BatchColumns, *, is_launched: bool = True) -> bool:
        """Plan a step, and return True if no inputs are sent."""
        plan = self.padding.advance(columns, self.last_rows, HostToDeviceBuffer())
        if plan is None:
            shape = self.padding.shape_of(columns)
            assert shape is not None
            self.padding.plan(columns, shape, self.last_rows, HostToDeviceBuffer())
        self.last_rows = self.last_rows.after(columns)
        if is_launched:
            self.table.launched(columns)
        return plan is not None


def test_only_the_next_step_of_the_same_decodes_advances() -> None:
    decodes = Decodes()
    assert [decodes.is_advance(decodes.columns()) for _ in range(4)] == [False, False, True, True]
    # A step that is dropped is planned again.
    assert decodes.is_advance(decodes.columns(), is_launched=False)
    assert [decodes.is_advance(decodes.columns()) for _ in range(3)] == [False, False, True]
    few = replace(decodes.columns(), samples=np.array([True, False, True]))
    assert not decodes.is_advance(few, is_launched=False)
    assert [decodes.is_advance(decodes.columns()) for _ in range(3)] == [False, False, True]
    decodes.padding.forget()
    assert not decodes.is_advance(decodes.columns())
    decodes.last_rows = NO_LAST_ROWS.after(decodes.columns().take([1, 0, 2]))  # The step before had another order.
    assert not decodes.is_advance(decodes.columns())


def test_the_padding_of_recurrent_layers_stays_at_position_0() -> None:
    decodes, shape = Decodes(), StepShape.decodes(4, has_states=True)
    decodes.padding = StepPadding([shape], 4)
    buffers = StepBuffers([shape], 4, 16, CPU)
    for step in range(4):
        moves = [StateMove(number, number + step) for number in (1, 2, 3)]
        columns = replace(decodes.columns(), states=StateColumns.of(moves))
        to_device = HostToDeviceBuffer()
        plan = decodes.padding.advance(columns, decodes.last_rows, to_device)
        assert (plan is not None) == (step > 1)
        plan = plan or decodes.padding.plan(columns, shape, decodes.last_rows, to_device)
        buffers.load(plan, DeviceBuffer.of(to_device.words, torch.tensor([5, 6, 7])), num_new_blocks=0)
        states = buffers.inputs(shape).states
        assert states is not None
        of_sequences = [[row, 8 + step, 1, row + 1, row + 1 + step] for row in range(3)]
        assert states.chunks[:, :5].tolist() == [*of_sequences, [3, 0, 1, 0, 0]]
        decodes.last_rows = decodes.last_rows.after(columns)
        decodes.table.launched(columns)
