"""Tables that stay on the device hold every sequence's blocks through arrival, growth, preemption and end."""

import random
from itertools import chain

import pytest
import torch

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.engine.sequence_table import SequenceTable
from replicas.model.batch.inputs import table_of
from replicas.model.batch.transfers import HostToDeviceBuffer
from replicas.model.cuda_graphs.buffers import StepBuffers
from replicas.model.cuda_graphs.padding import BlockTableRows, StepShape
from replicas.protocol import GenerateRequest, SamplingParams

NUM_ROWS, NUM_COLUMNS, FACTORS = 5, 12, (1, 3)


def make_sequence(number: int) -> Sequence:
    request = GenerateRequest(str(number), (1,) * 40, SamplingParams(max_tokens=9))
    sequence = Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=number)
    sequence.more_tables = [[]]
    return sequence


def tables_of(sequence: Sequence) -> list[list[int]]:
    return [sequence.block_table, *sequence.more_tables]


def block_tables() -> BlockTableRows:
    return BlockTableRows(NUM_ROWS, NUM_COLUMNS, FACTORS)


def running(num_sequences: int) -> list[Sequence]:
    table, sequences = SequenceTable(NUM_ROWS), [make_sequence(number) for number in range(num_sequences)]
    for sequence in sequences:
        table.enter(sequence)
    return sequences


def columns_of(sequences: list[Sequence]) -> BatchColumns:
    return BatchColumns.of([ScheduledSequence.of(sequence, 0, 1) for sequence in sequences])


def come_and_go(rng: random.Random, table: SequenceTable, sequence: Sequence) -> None:
    num_running = NUM_ROWS - len(table._free)
    if sequence.row is not None and rng.random() < 0.15:
        table.leave(sequence)
        sequence.block_table, sequence.more_tables = [], [[]]
    elif sequence.row is None and num_running < NUM_ROWS and rng.random() < 0.5:
        table.enter(sequence)
    for _ in range(rng.choice([0, 0, 1, 3])):
        if sequence.row is not None and len(sequence.block_table) < NUM_COLUMNS:
            for blocks in tables_of(sequence):
                blocks.append(rng.randrange(1, 1000))
    if rng.random() < 0.3:  # A block behind a window is given back.
        blocks = rng.choice(tables_of(sequence))
        blocks[: blocks.count(0) + 1] = [0] * min(len(blocks), blocks.count(0) + 1)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("factors", [FACTORS, (2,)])
def test_each_sequences_row_holds_its_table(seed: int, factors: tuple[int, ...]) -> None:
    rng, table = random.Random(seed), SequenceTable(NUM_ROWS)
    sequences = [make_sequence(number) for number in range(12)]
    rows = BlockTableRows(NUM_ROWS, NUM_COLUMNS, factors)
    buffers = StepBuffers([StepShape.decodes(NUM_ROWS)], NUM_COLUMNS, 4, torch.device("cpu"), len(factors))
    for _ in range(200):
        for sequence in sequences:
            come_and_go(rng, table, sequence)
        present = [sequence for sequence in sequences if sequence.row is not None]
        probe = make_sequence(99)  # It does not run, as those of a warm-up.
        probe.block_table, probe.more_tables = [rng.randrange(1, 1000)], []  # One table for all groups.
        chosen = rng.sample(present, rng.randint(0, len(present)))
        columns = columns_of([*chosen, probe] if len(chosen) < NUM_ROWS else chosen)
        to_device = HostToDeviceBuffer()
        num_new_blocks = rows.update(columns, to_device)
        if rng.random() < 0.1:
            rows.forget()  # The step could not run.
            if rng.random() < 0.5:
                continue
            to_device = HostToDeviceBuffer()
            num_new_blocks = rows.update(columns, to_device)
        if num_new_blocks:
            buffers.write_blocks(torch.from_numpy(to_device.words))
        assert len(set(columns.rows.tolist())) == len(columns.sequences)
        for sequence, row in zip(columns.sequences, columns.rows.tolist(), strict=True):
            for number, factor in enumerate(factors):
                for index, block in enumerate(table_of(sequence, number)):
                    assert block == 0 or buffers._tables[number, row, index] == factor * block
        assert not buffers._tables[:, -1].any()


def test_a_steady_batch_sends_new_blocks_alone() -> None:
    rows, sequences = block_tables(), running(3)
    num_sent = []
    for step in range(4):
        for blocks in chain(*map(tables_of, sequences)):
            blocks.append(1 + step)
        num_sent.append(rows.update(columns_of(sequences), HostToDeviceBuffer()))
    assert num_sent == [6, 6, 6, 6]


def test_sequences_that_take_turns_send_new_blocks_alone() -> None:
    rows, sequences = block_tables(), running(NUM_ROWS)
    num_sent = []
    for step in range(6):
        turn = sequences[step % 2 :: 2]
        for blocks in chain(*map(tables_of, turn)):
            blocks.append(1 + step)
        num_sent.append(rows.update(columns_of(turn), HostToDeviceBuffer()))
    assert num_sent == [6, 4] * 3
