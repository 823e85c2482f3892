"""Tables that stay on the device hold every sequence's blocks through arrival, growth, preemption and end."""

import random

import pytest
import torch

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.padding import BlockTableRows
from replicas.protocol import GenerateRequest, SamplingParams

NUM_ROWS, NUM_COLUMNS = 5, 12
NO_TOKENS = no_tokens(torch.device("cpu"))


def make_sequence(number: int) -> Sequence:
    request = GenerateRequest(str(number), (1,) * 40, SamplingParams(max_tokens=9))
    return Sequence(request, arrival_s=0.0, deadline_s=None, arrival_index=number)


def grow(rng: random.Random, sequence: Sequence) -> None:
    if rng.random() < 0.15:
        sequence.block_table, sequence.num_preemptions = [], sequence.num_preemptions + 1
    for _ in range(rng.choice([0, 0, 1, 3])):
        if len(sequence.block_table) < NUM_COLUMNS:
            sequence.block_table.append(rng.randrange(1, 1000))


@pytest.mark.parametrize("seed", range(20))
def test_each_sequences_row_holds_its_table(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [make_sequence(number) for number in range(12)]
    rows, tables = BlockTableRows(NUM_ROWS, NUM_COLUMNS), torch.zeros(NUM_ROWS, NUM_COLUMNS, dtype=torch.int32)
    for _ in range(200):
        for sequence in sequences:
            grow(rng, sequence)
        items = [ScheduledSequence.of(sequence, 0, 1) for sequence in rng.sample(sequences, rng.randint(1, NUM_ROWS))]
        to_device = HostToDeviceBuffer()
        update = rows.update(items, to_device)
        if rng.random() < 0.1:
            rows.forget()  # The step could not run.
            continue
        update.apply(tables, DeviceBuffer.of(to_device.words, NO_TOKENS))
        assert len(set(rows.rows_of(items))) == len(items)
        for item, row in zip(items, rows.rows_of(items), strict=True):
            table = item.sequence.block_table
            assert tables[row, : len(table)].tolist() == table


def test_a_steady_batch_sends_new_blocks_alone() -> None:
    rows = BlockTableRows(NUM_ROWS, NUM_COLUMNS)
    sequences = [make_sequence(number) for number in range(3)]
    num_sent = []
    for step in range(4):
        for sequence in sequences:
            sequence.block_table.append(1 + step)
        update = rows.update([ScheduledSequence.of(sequence, 0, 1) for sequence in sequences], HostToDeviceBuffer())
        num_sent.append(len(update.blocks))
    assert num_sent == [3, 3, 3, 3]


def test_sequences_that_take_turns_keep_their_rows() -> None:
    rows = BlockTableRows(NUM_ROWS, NUM_COLUMNS)
    sequences = [make_sequence(number) for number in range(NUM_ROWS)]
    num_sent = []
    for step in range(6):
        turn = sequences[step % 2 :: 2]
        for sequence in turn:
            sequence.block_table.append(1 + step)
        update = rows.update([ScheduledSequence.of(sequence, 0, 1) for sequence in turn], HostToDeviceBuffer())
        num_sent.append(len(update.blocks))
    assert num_sent == [3, 2] * 3
