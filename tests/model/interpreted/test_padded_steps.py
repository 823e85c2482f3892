"""Steps padded to the shape of a graph have the attention of unpadded ones, whatever the shape held before."""

import random

import pytest

pytest.importorskip("triton")

import torch

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention import triton
from replicas.model.attention.interface import AttentionCall, AttentionContext, Scoring
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.triton import TritonBackend
from replicas.model.batch.inputs import NO_LAST_ROWS, build_inputs
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, no_tokens
from replicas.model.cuda_graphs.buffers import StaticInputs, StepBuffers
from replicas.model.cuda_graphs.padding import StepPadding, StepShape
from replicas.model.hardware.device import compute_capability
from testkit.model.paged_cases import KINDS, Case, sequences

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
MAX_NUM_SEQS, LONGEST = 6, 320
SHAPES = [
    StepShape.decodes(MAX_NUM_SEQS),
    *(StepShape.mixed(size, MAX_NUM_SEQS) for size in (16, 48, 90)),
]


def random_items(rng: random.Random, owners: list[Sequence], shape: StepShape) -> list[ScheduledSequence]:
    """Return items that fit the shape, each of another sequence."""
    items: list[ScheduledSequence] = []
    num_left = shape.num_tokens
    for owner in rng.sample(owners, rng.randint(1, MAX_NUM_SEQS)):
        num_tokens = 1 if shape.num_chunks == 0 else min(num_left, rng.choice([1, 1, 2, 15, 40]))
        if num_tokens > 0:
            items.append(ScheduledSequence.of(owner, rng.choice([0, 1, 63, 64, LONGEST - num_tokens]), num_tokens))
            num_left -= num_tokens
    return items


def padded(
    padding: StepPadding, buffers: StepBuffers, items: list[ScheduledSequence], shape: StepShape
) -> StaticInputs:
    to_device = HostToDeviceBuffer()
    columns = BatchColumns.of(items)
    plan = padding.plan(columns, shape, NO_LAST_ROWS, to_device)
    num_new_blocks = padding.add_blocks(columns, to_device)
    buffers.load(plan, DeviceBuffer.of(to_device.words, no_tokens(CPU)), num_new_blocks)
    return buffers.inputs(shape)


def spoil_unseen(buffers: StepBuffers, case: Case, items: list[ScheduledSequence], spoiled: int) -> None:
    """Put block `spoiled` in the places of blocks behind the window, as if another sequence had one of them."""
    for item, row in zip(items, BatchColumns.of(items).rows.tolist(), strict=True):
        num_unseen = 0 if case.window is None else max(0, item.start + 1 - case.window) // case.block_size
        buffers._tables[:, row, :num_unseen] = spoiled


def attended(context: AttentionContext, case: Case, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    (num_heads, num_kv_heads), (key_size, value_size) = case.heads, case.sizes

    def draw(*shape: int) -> torch.Tensor:
        # The rows of the padding have other numbers than those of any sequence.
        numbers = torch.full((SHAPES[-1].num_tokens, *shape), 3.0)
        numbers[:num_tokens] = torch.randn(num_tokens, *shape, generator=generator)
        return numbers[: context.slots.numel()].to(case.dtype)

    query, key, value = draw(num_heads, key_size), draw(num_kv_heads, key_size), draw(num_kv_heads, value_size)
    sinks = torch.linspace(-1, 1, num_heads) if case.has_sinks else None
    return context.attend(
        AttentionCall(0, query, key, value, Scoring(case.scale, case.softcap, sinks), case.window, frozenset())
    )


def check(case: Case, seed: int, num_steps: int) -> None:
    rng = random.Random(seed)
    owners = sequences([LONGEST] * 8, case.block_size, 8 * -(-LONGEST // case.block_size))
    spoiled = 8 * -(-LONGEST // case.block_size) + 1
    caches = [KVCache([case.layer], spoiled, case.block_size, case.dtype, CPU) for _ in "ab"]
    generator = torch.Generator().manual_seed(seed)
    for part in ("keys", "values"):
        numbers = torch.randn(getattr(caches[0][0], part).shape, generator=generator).to(case.dtype)
        numbers[spoiled] = torch.nan
        for cache in caches:
            getattr(cache[0], part).copy_(numbers)
    max_blocks = -(-LONGEST // case.block_size)
    buffers = StepBuffers(SHAPES, max_blocks, case.block_size, CPU)
    padding = StepPadding(SHAPES, max_blocks)
    backend = TritonBackend(rng.choice([0, 20]), compute_capability(CPU))
    for _ in range(num_steps):
        shape = rng.choice(SHAPES)
        items = random_items(rng, owners, shape)
        num_tokens = sum(item.num_tokens for item in items)
        inputs = padded(padding, buffers, items, shape)
        plain = build_inputs(items, case.block_size, CPU)
        assert torch.equal(inputs.input_ids[0, :num_tokens], plain.input_ids[0])
        assert torch.equal(inputs.position_ids[0, :num_tokens], plain.position_ids[0])
        if inputs.logits_rows is not None:
            assert inputs.logits_rows.tolist()[: len(plain.logits_rows)] == plain.logits_rows.tolist()
        (group,) = inputs.groups
        tables = buffers._tables.clone()
        spoil_unseen(buffers, case, items, spoiled)
        output = attended(backend.planned(caches[0], group.slots, group.plan), case, num_tokens)
        buffers._tables.copy_(tables)
        expected = attended(backend(caches[1], plain), case, num_tokens)
        tolerance = 2e-3 if case.dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(output[:num_tokens], expected, atol=tolerance, rtol=tolerance)
        assert not output[num_tokens:].any()
        for part in ("keys", "values"):
            one, other = (getattr(cache[0], part)[1:spoiled] for cache in caches)  # Block 0 is the padding's.
            assert torch.equal(one, other)


QUICK = "all"


@pytest.mark.parametrize("kind", [QUICK, *(pytest.param(name, marks=pytest.mark.deep) for name in KINDS)])
def test_padding_changes_no_attention(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_MIN_PART_KEYS", 64)
    is_deep = request.node.get_closest_marker("deep") is not None
    for seed in range(3 if is_deep else 1):
        check(KINDS[kind], seed, num_steps=12 if is_deep else 3)
