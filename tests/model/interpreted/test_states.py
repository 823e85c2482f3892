"""Kernels of recurrent layers: the numbers of plain torch, whatever the steps, their repetition and their padding."""

import random
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ScheduledSequence, StateMove
from replicas.errors import ModelLoadError
from replicas.model.attention import state_select, state_triton
from replicas.model.attention.recurrent import ConvCall, RuleCall, StateContext
from replicas.model.attention.state_cache import StateCache, StateLayer
from replicas.model.attention.state_select import StateSpec, check_states, choose_states, state_calls, state_schedule
from replicas.model.attention.state_torch import TorchStates
from replicas.model.attention.state_triton import TritonStateBackend
from replicas.model.batch.inputs import NO_LAST_ROWS, build_inputs, dummy_item
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.buffers import StepBuffers
from replicas.model.cuda_graphs.padding import StepPadding, StepShape

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
CONVOLUTION = StateLayer(0, num_channels=150, conv_width=3)
DELTA = StateLayer(0, num_channels=40, conv_width=4, num_heads=2, num_key_heads=1, key_size=16, value_size=16)
WIDE = StateLayer(0, num_channels=33, conv_width=4, num_heads=2, num_key_heads=1, key_size=40, value_size=36)
TRITON, INVARIANT = TritonStateBackend(), TritonStateBackend(is_batch_invariant=True)


def spec(layer: StateLayer, block_size: int = 16, dtype: torch.dtype = torch.float32) -> StateSpec:
    return StateSpec([layer], block_size, dtype, CPU)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", [TRITON, INVARIANT], ids=["decodes", "one kernel"])
@pytest.mark.parametrize(
    ("layer", "block_size"),
    [(CONVOLUTION, 16), (DELTA, 16), (DELTA, 5), pytest.param(WIDE, 32, marks=pytest.mark.deep)],
)
def test_outputs_and_states_are_those_of_plain_torch(
    layer: StateLayer, block_size: int, backend: TritonStateBackend
) -> None:
    assert check_states(spec(layer, block_size), backend) is None


def test_the_kernels_take_numbers_in_16_bits() -> None:
    assert check_states(spec(DELTA, dtype=torch.float16), TRITON) is None


@pytest.mark.parametrize("name", ["convolve", "advance"])
def test_a_kernel_that_does_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_triton, name, lambda *_: None)
    assert check_states(spec(DELTA), TRITON) is not None


def test_without_working_kernels_states_are_in_plain_torch_or_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_states(spec(DELTA)) is None
    on_gpu = replace(spec(DELTA), device=torch.device("cuda"))
    monkeypatch.setattr(state_select, "check_states", lambda *_: "it is wrong")
    assert choose_states(on_gpu) is None
    with pytest.raises(ModelLoadError, match=r"batch_invariant is true, and the kernels .*: it is wrong"):
        choose_states(replace(on_gpu, is_batch_invariant=True))
    monkeypatch.setattr(state_select, "check_states", lambda *_: None)
    assert isinstance(choose_states(on_gpu), TritonStateBackend)


def new_cache(layer: StateLayer, num_slots: int = 60, block_size: int = 16) -> StateCache:
    """Return a cache whose slots hold what a former owner left."""
    cache = StateCache([layer], num_slots, block_size, torch.float32, CPU)
    for part in parts(cache):
        part.fill_(torch.nan)
    return cache


def parts(cache: StateCache) -> list[Tensor]:
    layer = cache[0]
    return [layer.inputs, layer.states, layer.keys, layer.updates, layer.decays]


def outputs(context: StateContext, calls: tuple[ConvCall, RuleCall | None]) -> list[Tensor]:
    conv, rule = calls
    assert rule is not None
    return [context.convolve(conv), context.advance(rule).flatten(1)]


def test_a_repeated_step_writes_the_same() -> None:
    cache = new_cache(DELTA)
    for number, items in list(enumerate(state_schedule(16)))[:4]:
        inputs = build_inputs(items, 16, CPU)
        runs = []
        for _ in "ab":
            computed = outputs(TRITON(cache, inputs), state_calls(DELTA, inputs, torch.float32, number))
            runs.append([*computed, *(part[1:].clone() for part in parts(cache))])
        for one, other in zip(*runs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


LENGTH = 53


def in_chunks(ends: tuple[int, ...], neighbours: int) -> list[Tensor]:
    """Return the outputs of a sequence of LENGTH tokens in chunks that end there, in the middle of `neighbours`."""
    cache = new_cache(DELTA)
    whole = build_inputs([dummy_item(0, LENGTH, 16)], 16, CPU)
    conv, rule = state_calls(DELTA, whole, torch.float32, seed=0)
    assert rule is not None
    rows: list[list[Tensor]] = []
    start, slot, num_slots = 0, 0, 40
    for end in ends:
        source = slot
        if start == 0 or start // 16 != end // 16:
            slot, num_slots = num_slots + 1, num_slots + 1
        others = [replace(dummy_item(0, 2 + 15 * i, 16), state=StateMove(0, 1 + i)) for i in range(neighbours)]
        item = replace(dummy_item(start, end - start, 16), state=StateMove(source, slot))
        items = [*others[:1], item, *others[1:]]
        inputs = build_inputs(items, 16, CPU)
        first = others[0].num_tokens if others else 0
        some_conv, _ = state_calls(DELTA, inputs, torch.float32, seed=end)
        mine, of_item = slice(first, first + end - start), slice(start, end)
        some_conv = replace(some_conv, weight=conv.weight)
        some_conv.inputs[mine] = conv.inputs[of_item]
        given = {}
        for name in ("query", "key", "value", "decay", "beta"):
            numbers = torch.zeros(len(some_conv.inputs), *getattr(rule, name).shape[1:])
            numbers[mine] = getattr(rule, name)[of_item]
            given[name] = numbers
        rows.append([output[mine] for output in outputs(INVARIANT(cache, inputs), (some_conv, replace(rule, **given)))])
        start = end
    return [torch.cat(some) for some in zip(*rows, strict=True)]


def test_the_bits_of_batch_invariant_outputs_depend_on_the_sequence_alone() -> None:
    expected = in_chunks((LENGTH,), neighbours=0)
    for ends in ((5, 6, 15, 16, 17, 40, LENGTH), (31, 32, LENGTH)):
        for one, other in zip(in_chunks(ends, neighbours=2), expected, strict=True):
            assert torch.equal(one, other)


def test_the_parts_of_an_item_go_on_from_the_slot_that_they_write() -> None:
    """Scored prompts run in parts. A repetition begins with the first part, and so finds its source unchanged."""
    caches = [new_cache(DELTA), new_cache(DELTA)]
    for start, end, state in ((0, 21, (0, 1)), (21, 45, (1, 2)), (45, 48, (2, 2)), (48, 70, (2, 2)), (70, 71, (2, 2))):
        inputs = build_inputs([replace(dummy_item(start, end - start, 16), state=StateMove(*state))], 16, CPU)
        calls = state_calls(DELTA, inputs, torch.float32, seed=end)
        contexts = TRITON(caches[0], inputs), TorchStates(caches[1], inputs)
        for one, other in zip(*(outputs(context, calls) for context in contexts), strict=True):
            torch.testing.assert_close(one, other)


class Schedule:
    """Random steps of sequences that the engine could give slots in this way."""

    def __init__(self, seed: int, num_sequences: int) -> None:
        self.rng = random.Random(seed)
        self.items = [replace(dummy_item(0, 1, 16), num_tokens=0, samples=True) for _ in range(num_sequences)]
        self.num_slots = 0

    def step(self, num_tokens: int, most: int) -> list[ScheduledSequence]:
        """Return items of at most `most` tokens each and `num_tokens` together."""
        items = []
        for index in self.rng.sample(range(len(self.items)), self.rng.randint(1, len(self.items))):
            length = min(num_tokens, self.rng.choice([1, 1, 2, 17, 40]), most)
            if length > 0:
                num_tokens -= length
                self.items[index] = self._next(self.items[index], length)
                items.append(self.items[index])
        return items

    def _next(self, before: ScheduledSequence, length: int) -> ScheduledSequence:
        start, source = before.end, before.state.target
        end = start + length
        boundary, target = end - end % 16, source
        snapshots = []
        if start == 0 or boundary != start - start % 16:
            self.num_slots += 1
            target = self.num_slots
            for position in range(start - start % 16 + 16, boundary, 16)[:3]:
                self.num_slots += 1
                snapshots.append((position, self.num_slots))
        before.sequence.block_table = [0] * 40
        before.sequence.token_ids[:] = [1] * end
        return replace(before, start=start, num_tokens=length, state=StateMove(source, target, tuple(snapshots)))


SHAPES = [StepShape.decodes(6, has_states=True), *(StepShape.mixed(size, 6, has_states=True) for size in (16, 60))]


def test_a_captured_shape_can_run_before_its_first_step() -> None:
    cache = new_cache(DELTA)
    for shape in SHAPES:
        states = StepBuffers([shape], 40, 16, CPU).inputs(shape).states
        assert states is not None
        inputs = build_inputs([dummy_item(0, shape.num_tokens, 16)], 16, CPU)
        outputs(TRITON.planned(cache, states), state_calls(DELTA, inputs, torch.float32, 0))
    assert all(part[1:].isnan().all() for part in parts(cache))


def test_padding_changes_no_state_and_no_output() -> None:
    schedule = Schedule(seed=3, num_sequences=5)
    caches = [new_cache(DELTA, num_slots=90), new_cache(DELTA, num_slots=90)]
    buffers = StepBuffers(SHAPES, 40, 16, CPU)
    padding = StepPadding(SHAPES, 40)
    for number in range(6):
        shape = SHAPES[number % 3]
        items = schedule.step(shape.num_tokens, most=1 if shape.num_chunks == 0 else 60)
        plain = build_inputs(items, 16, CPU)
        num_tokens = plain.input_ids.shape[1]
        to_device = HostToDeviceBuffer()
        plan = padding.plan(BatchColumns.of(items), shape, NO_LAST_ROWS, to_device)
        buffers.load(plan, DeviceBuffer.of(to_device.words, no_tokens(CPU)), num_new_blocks=0)
        padded = buffers.inputs(shape).states
        assert padded is not None
        conv, rule = state_calls(DELTA, build_inputs([dummy_item(0, shape.num_tokens, 16)], 16, CPU), torch.float32, 0)
        assert rule is not None
        names = ("query", "key", "value", "decay", "beta")
        fewer = replace(rule, **{name: getattr(rule, name)[:num_tokens] for name in names})
        expected = outputs(TRITON(caches[1], plain), (replace(conv, inputs=conv.inputs[:num_tokens]), fewer))
        computed = outputs(TRITON.planned(caches[0], padded), (conv, rule))
        for one, other in zip(computed, expected, strict=True):
            assert torch.equal(one[:num_tokens], other)
            assert one.isfinite().all()
        for one, other in zip(parts(caches[0]), parts(caches[1]), strict=True):
            torch.testing.assert_close(one[1:], other[1:], rtol=0, atol=0, equal_nan=True)
    assert schedule.num_slots > 5
