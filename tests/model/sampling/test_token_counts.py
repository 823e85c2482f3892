"""Counts of tokens on the device give the penalties that the host computes from the sequences' tokens."""

import random

import pytest
import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.model.batch.inputs import NO_LAST_ROWS, LastRows
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.sampling.logits_processors import LogitsProcessors
from replicas.model.sampling.token_counts import IN_PROMPT, CountSlots, TokenCounts, penalize_by_definition
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams

VOCAB_SIZE, NUM_SLOTS = 40, 4
CPU = torch.device("cpu")
NO_TOKENS = no_tokens(CPU)


def random_sequence(rng: random.Random, number: int) -> Sequence:
    penalties = {
        "repetition_penalty": rng.choice([1.0, 0.7, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.9, -0.4]),
        "frequency_penalty": rng.choice([0.0, 0.3, -1.1]),
    }
    bias = (LogitBias(3, 2.5),) if rng.random() < 0.3 else ()
    prompt = tuple(rng.randrange(VOCAB_SIZE + 2) for _ in range(rng.randint(1, 30)))
    params = SamplingParams(max_tokens=200, logit_bias=bias, **penalties)
    sequence = Sequence(GenerateRequest(str(number), prompt, params), 0.0, None, number)
    sequence.status = SequenceStatus.RUNNING
    return sequence


def on_host(items: list[ScheduledSequence], logits: Tensor) -> Tensor:
    to_device = HostToDeviceBuffer()
    changes = LogitsProcessors(frozenset(), VOCAB_SIZE, None).plan(BatchColumns.of(items), NO_LAST_ROWS, to_device)
    return changes.apply(logits, DeviceBuffer.of(to_device.words, NO_TOKENS), None)


class DeviceCounts:
    """Counts on a device, with their plans."""

    def __init__(self) -> None:
        self.counts = TokenCounts(NUM_SLOTS, VOCAB_SIZE, CPU, penalize_by_definition)
        self.slots = CountSlots(NUM_SLOTS, VOCAB_SIZE)

    def change(
        self, items: list[ScheduledSequence], logits: Tensor, last_rows: LastRows, last_tokens: Tensor
    ) -> Tensor:
        to_device = HostToDeviceBuffer()
        changes = LogitsProcessors(frozenset(), VOCAB_SIZE, self.slots).plan(
            BatchColumns.of(items), last_rows, to_device
        )
        return changes.apply(logits, DeviceBuffer.of(to_device.words, last_tokens), self.counts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_penalties_are_those_of_the_host(seed: int) -> None:
    """Sequences come, wait, come back and run steps again; the newest tokens may be known to the device alone."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    device = DeviceCounts()
    sequences = [random_sequence(rng, number) for number in range(9)]
    running_again: set[Sequence] = set()
    for _ in range(120):
        running = rng.sample(sequences, rng.randint(1, NUM_SLOTS))
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING if sequence in running else SequenceStatus.WAITING
        newest = [rng.randrange(VOCAB_SIZE + 2) for _ in running]
        last_rows = LastRows(BatchColumns.of([ScheduledSequence.of(sequence, 0, 1) for sequence in running]))
        items, are_late = [], []
        for sequence in running:
            is_late = rng.random() < 0.5 and sequence not in running_again
            end = len(sequence.token_ids) + is_late
            item = ScheduledSequence.of(sequence, end - 1, 1)
            object.__setattr__(item, "samples", True)
            items.append(item)
            are_late.append(is_late)
        logits = torch.randn(len(items), VOCAB_SIZE + 3, generator=generator) * 4
        found = device.change(items, logits, last_rows, torch.tensor(newest))
        for sequence, token_id, is_late in zip(running, newest, are_late, strict=True):
            if is_late:
                sequence.token_ids.append(token_id)
        expected = on_host(items, logits)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for sequence in running:
            running_again.discard(sequence)
            if rng.random() < 0.2:  # Its last steps run again, and may give other tokens.
                running_again.add(sequence)
                del sequence.token_ids[max(sequence.num_prompt_tokens, len(sequence.token_ids) - rng.randint(1, 3)) :]
            elif rng.random() < 0.5:
                sequence.token_ids.append(rng.randrange(VOCAB_SIZE))
        if rng.random() < 0.05:
            device.slots.forget()


def test_a_step_sends_new_tokens_alone() -> None:
    rng = random.Random(1)
    device = DeviceCounts()
    sequence = random_sequence(rng, 0)
    sequence.has_penalties = sequence.is_special = True
    lengths = []
    for _ in range(5):
        sequence.token_ids.extend([7, 8])
        item = ScheduledSequence.of(sequence, len(sequence.token_ids) - 1, 1)
        plan = device.slots.plan(BatchColumns.of([item]), NO_LAST_ROWS, HostToDeviceBuffer())
        assert plan is not None
        lengths.append((len(plan.prompt_cells) > 0, len(plan.output_cells)))
        to_device = HostToDeviceBuffer()
        plan = device.slots.plan(BatchColumns.of([item]), NO_LAST_ROWS, to_device)  # The step runs again.
        assert plan is not None and len(plan.new_slots) == 1
        device.counts.apply(plan, torch.zeros(1, VOCAB_SIZE), DeviceBuffer.of(to_device.words, NO_TOKENS))
    assert lengths == [(True, 2), *[(False, 2)] * 4]
    counts = device.counts.table[device.slots._held[sequence].slot]
    assert counts.sum() - int((counts & IN_PROMPT).sum()) == 10


def test_penalties_wait_only_for_what_the_device_does_not_know() -> None:
    def batch(**params: object) -> ScheduledBatch:
        request = GenerateRequest("one", (1, 2), SamplingParams(max_tokens=4, **params))  # type: ignore[arg-type]
        return ScheduledBatch((ScheduledSequence.of(Sequence(request, 0.0, None, 0), 0, 2),))

    assert not batch().needs_sync(counts_on_device=False)
    assert batch(frequency_penalty=0.1).needs_sync(counts_on_device=False)
    assert not batch(frequency_penalty=0.1).needs_sync(counts_on_device=True)
    assert batch(bad_words=((3, 4),)).needs_sync(counts_on_device=True)
    assert not batch(bad_words=((3,),)).needs_sync(counts_on_device=False)
