"""Sampling in fixed arrays gives the tokens and the counts of the same operations, launched one by one."""

import random
from functools import partial
from itertools import product

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.inputs import LastRows
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.graphs import bucket_sizes
from replicas.model.sampling import sampler, triton_draw
from replicas.model.sampling.fixed_arrays import NUM_ENTRIES, FixedSampling, SamplingPadding, part_lengths
from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.sampler import (
    SampledTokens,
    Sampler,
    SamplingPlan,
    SamplingPlanner,
    SamplingShape,
    sample_greedy,
)
from replicas.model.sampling.token_counts import CountSlots, TokenCounts
from replicas.model.sampling.triton_penalties import penalize
from replicas.protocol import GenerateRequest, LogitBias, SamplingParams

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
VOCAB_SIZE, NUM_LOGITS, MAX_ROWS = 61, 64, 9
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
# The first ones can be of a step that changes no logit.
PARAMS = (
    GREEDY,
    SamplingParams(max_tokens=99, seed=1),
    SamplingParams(max_tokens=99, seed=2, top_p=0.8, top_k=9),
    SamplingParams(max_tokens=99, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(max_tokens=99, seed=3, min_p=0.02, presence_penalty=-0.7, stop_token_ids=(7,), min_tokens=4),
    SamplingParams(
        max_tokens=99, seed=4, logit_bias=(LogitBias(9, 4.0), LogitBias(60, -9.0)), bad_words=((5,), (6, 9))
    ),
)


class Worlds:
    """The same steps twice: with operations one by one, and in fixed arrays."""

    def __init__(self, rng: random.Random, kinds: tuple[SamplingParams, ...], dtype: torch.dtype) -> None:
        self._rng = rng
        self._generator = torch.Generator().manual_seed(rng.randrange(1000))
        self._sequences = [
            Sequence(GenerateRequest(f"{row}", tuple(range(row, row + 40)), rng.choice(kinds)), 0.0, None, row)
            for row in range(MAX_ROWS)
        ]
        self._counts = [TokenCounts(MAX_ROWS, VOCAB_SIZE, CPU, penalize) for _ in "ab"]
        for counts in self._counts:
            counts.table[0] = torch.arange(VOCAB_SIZE) % 5  # The slot that neutral parameters name.
        slots = CountSlots(MAX_ROWS, VOCAB_SIZE)
        self._planner = SamplingPlanner(frozenset({2}), VOCAB_SIZE, slots)
        self._padding = SamplingPadding(bucket_sizes(MAX_ROWS))
        self._logits = torch.randn(MAX_ROWS, NUM_LOGITS, generator=self._generator).to(dtype)
        self._fixed = FixedSampling(self._logits, self._counts[1])
        self._last: list[Sequence] = []
        self._last_tokens = no_tokens(CPU)
        self.shapes: set[SamplingShape | None] = set()

    def step(self, has_masks: bool) -> None:
        """Sample some sequences, those of the step before without their tokens, and compare."""
        rng, sequences = self._rng, self._rng.sample(self._sequences, self._rng.randint(1, MAX_ROWS))
        ends = [len(sequence.token_ids) + (sequence in self._last) for sequence in sequences]
        items = [ScheduledSequence.of(sequence, end - 1, 1) for sequence, end in zip(sequences, ends, strict=True)]
        last = [ScheduledSequence.of(sequence, 0, 1) for sequence in self._last]
        to_device = HostToDeviceBuffer()
        plan = self._planner.plan(BatchColumns.of(items), LastRows(BatchColumns.of(last)), to_device)
        plan = self._padding.plan(plan, len(items), to_device, has_masks=has_masks)
        self._logits[: len(items)] = 3 * torch.randn(len(items), NUM_LOGITS, generator=self._generator)
        if rng.random() < 0.3:
            self._logits[: len(items)] = self._logits[: len(items)].round()
        self._logits[: len(items), 0] += 4  # Arrays hold zeros where nothing has been written.
        masks = self._masks(len(items)) if has_masks else None
        on_device = DeviceBuffer.of(to_device.words, self._last_tokens)
        tokens = self._compared(plan, self._logits[: len(items)], on_device, masks)
        for sequence, token in zip(self._last, self._last_tokens.tolist(), strict=True):
            sequence.token_ids.append(token)
        self._last, self._last_tokens = sequences, tokens
        self.shapes.add(None if plan.fixed is None else plan.fixed.shape)

    def _masks(self, num_rows: int) -> RowMasks:
        rows = torch.randperm(num_rows, generator=self._generator)[: 1 + num_rows // 2]
        bits = torch.randint(0, 256, (len(rows), -(-VOCAB_SIZE // 32) * 4), generator=self._generator)
        bits[:, 1] |= 4
        return RowMasks(rows, bits.to(torch.uint8))

    def _compared(self, plan: SamplingPlan, logits: Tensor, on_device: DeviceBuffer, masks: RowMasks | None) -> Tensor:
        to_host = DeviceToHostBuffer()
        pending = Sampler(self._counts[0]).launch(plan, logits, None, on_device, to_host, masks)
        expected = SampledTokens(pending.tokens, to_host[pending.pending][1].bool())
        found = greedy = sample_greedy(logits)
        if plan.fixed is not None:
            self._fixed.load(plan, greedy, on_device, masks)
            found = self._fixed.choose(plan.fixed.shape).first(len(logits))
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.is_finite.tolist() == expected.is_finite.tolist()
        assert torch.equal(self._counts[0].table, self._counts[1].table)
        return expected.tokens.clone()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 30))])
def test_tokens_and_counts_are_those_of_operations_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "has_draw_kernel", lambda _: True)
    # Programs of many rows are faster in the interpreter.
    monkeypatch.setattr(triton_draw, "draw_truncated", partial(triton_draw.draw_truncated, tile_rows=MAX_ROWS + 7))
    rng = random.Random(seed)
    for kinds in (PARAMS, PARAMS[:3], (GREEDY, *PARAMS[3:4])):
        worlds = Worlds(rng, kinds, (torch.float32, torch.bfloat16)[seed % 2])
        for number in range(4):
            worlds.step(has_masks=number % 3 == 2)
        assert any(shape is not None and shape.num_rows < MAX_ROWS for shape in worlds.shapes)


def planned(params: SamplingParams, *, has_masks: bool = False) -> SamplingPlan:
    sequence = Sequence(GenerateRequest("one", (3, 4), params), 0.0, None, 0)
    to_device, columns = HostToDeviceBuffer(), BatchColumns.of([ScheduledSequence.of(sequence, 1, 1)])
    slots = CountSlots(1, 2 * NUM_ENTRIES)
    planner = SamplingPlanner(frozenset(), 2 * NUM_ENTRIES, slots)
    plan = planner.plan(columns, LastRows(BatchColumns.of([])), to_device)
    return SamplingPadding((1, 3)).plan(plan, 1, to_device, has_masks=has_masks)


def test_a_plan_has_the_kind_of_its_rows_alone() -> None:
    kinds = [planned(params).fixed for params in PARAMS]
    assert kinds[0] is None
    assert [some and (some.shape.is_truncated, some.shape.has_changes) for some in kinds[1:]] == [
        (False, False), (True, False), (False, True), (True, True), (False, True),
    ]  # fmt: skip
    masked = planned(GREEDY, has_masks=True).fixed
    assert masked is not None and masked.shape == SamplingShape(1, is_truncated=False, has_changes=True)


def test_entries_that_do_not_fit_are_applied_one_by_one() -> None:
    for number, fits in ((NUM_ENTRIES, True), (NUM_ENTRIES + 1, False)):
        params = SamplingParams(max_tokens=1, logit_bias=tuple(LogitBias(token_id, 1.0) for token_id in range(number)))
        assert (planned(params).fixed is not None) == fits


@pytest.mark.parametrize("num_rows", [1, 2, 9, 256])
def test_every_array_begins_at_a_multiple_of_16_bytes(num_rows: int) -> None:
    """Triton compiles a kernel again for pointers of another alignment."""
    for is_truncated, has_changes in product((True, False), (True, False)):
        shape = SamplingShape(num_rows, is_truncated, has_changes)
        assert all(length % 2 == 0 for length in part_lengths(shape)) and shape.num_cells >= num_rows
