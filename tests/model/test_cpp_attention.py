"""The compiled attention against attention by definition, over every mixture of chunks."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention import AttentionCall, Scoring
from replicas.model.batch_inputs import build_inputs
from replicas.model.cpp_attention import CppAttention, can_attend
from replicas.model.kv_cache import AttentionLayer, KVCache
from tests.model.compiled import need_kernels, with_threads
from tests.model.paged_cases import MIXTURES, attend_by_definition, sequences

pytestmark = pytest.mark.usefixtures("_kernels")
CPU = torch.device("cpu")
KINDS = list(itertools.product([None, 1, 24, 40], [None, 5.0], [False, True]))
# Products of bfloat16 numbers are exact in float32; what is left is rounding inputs and output.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def _kernels() -> None:
    need_kernels()


class World:
    """Sequences with random keys and values, and a cache that what they know lies in."""

    def __init__(
        self, chunks: list[tuple[int, int]], layer: AttentionLayer, dtype: torch.dtype, block_size: int = 16
    ) -> None:
        self.chunks, self.layer, self.block_size = chunks, layer, block_size
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        num_blocks = sum(-(-end // block_size) for _, end in chunks)
        self.owners = sequences([end for _, end in chunks], block_size, num_blocks)
        self.keys = [numbers(end, layer.num_kv_heads, layer.key_size) for _, end in chunks]
        self.values = [numbers(end, layer.num_kv_heads, layer.value_size) for _, end in chunks]
        num_tokens = sum(end - start for start, end in chunks)
        # As models hand it over: heads lie outside tokens.
        self.query = numbers(layer.num_query_heads, num_tokens, layer.key_size).transpose(0, 1)
        self.sinks = numbers(layer.num_query_heads)
        self.cache = KVCache([layer], num_blocks, block_size, dtype, CPU)
        # What a former owner left must not show, not even a NaN.
        self.cache[0].keys.fill_(torch.nan)
        self.cache[0].values.fill_(torch.nan)

    def attend(self, scoring: Scoring, window: int | None) -> Tensor:
        """Store what comes before the chunks, then attend to the chunks."""
        earlier = [(i, 0, start) for i, (start, _) in enumerate(self.chunks) if start > 0]
        if earlier:
            num_tokens = sum(end for _, _, end in earlier)
            self._pass(earlier, self.query.new_zeros(num_tokens, *self.query.shape[1:]), scoring, window)
        return self._pass([(i, *chunk) for i, chunk in enumerate(self.chunks)], self.query, scoring, window)

    def expected(self, scoring: Scoring, window: int | None) -> Tensor:
        outputs, row = [], 0
        for keys, values, (start, end) in zip(self.keys, self.values, self.chunks, strict=True):
            query = self.query[row : row + end - start]
            outputs.append(attend_by_definition(query, keys, values, scoring, window))
            row += end - start
        return torch.cat(outputs)

    def _pass(self, parts: list[tuple[int, int, int]], query: Tensor, scoring: Scoring, window: int | None) -> Tensor:
        items = [ScheduledSequence(self.owners[i], start, end - start) for i, start, end in parts]
        call = AttentionCall(
            layer=0,
            query=query,
            key=torch.cat([self.keys[i][start:end] for i, start, end in parts]),
            value=torch.cat([self.values[i][start:end] for i, start, end in parts]),
            scoring=scoring,
            window=window,
            extras=frozenset(),
        )
        return CppAttention(self.cache, build_inputs(items, self.block_size, CPU)).attend(call)


def check(world: World, scoring: Scoring, window: int | None) -> None:
    tolerance = TOLERANCES[world.query.dtype]
    found, expected = world.attend(scoring, window).double(), world.expected(scoring, window)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("heads", "sizes"), [((4, 4), (16, 16)), ((6, 2), (64, 64)), ((14, 2), (48, 32))])
def test_equals_attention_by_definition(
    chunks: list[tuple[int, int]], heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    world = World(chunks, AttentionLayer(0, *heads, *sizes, None, None, False), dtype)
    for window, softcap, has_sinks in KINDS:
        check(world, Scoring(0.1, softcap, world.sinks if has_sinks else None), window)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(8))
def test_equals_attention_by_definition_in_random_shapes(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.randint(1, 4)
    sizes = rng.choice([(16, 16), (32, 80), (128, 128), (96, 64), (256, 256)])
    layer = AttentionLayer(0, num_kv_heads * rng.randint(1, 40), num_kv_heads, *sizes, None, None, False)
    chunks = []
    for _ in range(rng.randint(1, 5)):
        end = rng.randint(1, 400)
        chunks.append((rng.choice([end - 1, rng.randrange(end)]), end))
    world = World(chunks, layer, dtype, block_size=rng.choice([1, 4, 16, 48]))
    softcap, sinks = rng.choice([None, 3.0]), rng.choice([None, world.sinks])
    check(world, Scoring(sizes[0] ** -0.5, softcap, sinks), rng.choice([None, 1, 70, 200]))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_context_is_split_between_threads(dtype: torch.dtype) -> None:
    layer = AttentionLayer(0, 6, 3, 64, 64, None, None, False)
    with with_threads(3):
        for chunks in ([(3000, 3001)], [(2000, 2003), (700, 701)]):
            world = World(chunks, layer, dtype)
            for window, softcap, has_sinks in ((None, None, False), (1500, 2.0, True)):
                check(world, Scoring(0.125, softcap, world.sinks if has_sinks else None), window)


def test_output_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    chunks = [(50, 51), (299, 300), (30, 75), (0, 2)]
    layer = AttentionLayer(0, 6, 2, 64, 64, None, None, False)
    together = World(chunks, layer, torch.float32)
    outputs = together.attend(Scoring(0.125), None)
    alone = World(chunks, layer, torch.float32)
    alone.chunks = chunks[:1]
    alone.query = together.query[:1]
    assert torch.equal(alone.attend(Scoring(0.125), None), outputs[:1])


def test_only_blocks_inside_the_window_are_read() -> None:
    layer = AttentionLayer(0, 1, 1, 16, 16, 24, None, False)
    cache = KVCache([layer], 64, 16, torch.float32, CPU)
    (owner,) = sequences([400], block_size=16, num_blocks=64)
    ones = torch.ones(400, 1, 16)
    for start, num_tokens in ((0, 395), (395, 4), (399, 1)):
        inputs = build_inputs([ScheduledSequence(owner, start, num_tokens)], 16, CPU)
        rows = ones[:num_tokens]
        call = AttentionCall(0, rows, rows, rows, Scoring(1.0), 24, frozenset())
        torch.testing.assert_close(CppAttention(cache, inputs).attend(call), rows)
        # The blocks of positions 0..367, which no later token sees.
        cache[0].keys[owner.block_table[:23]] = torch.nan


def test_head_sizes_that_the_kernel_cannot_read_are_left_to_others() -> None:
    assert can_attend([AttentionLayer(0, 4, 2, 48, 32, None, None, False)])
    assert not can_attend([AttentionLayer(0, 4, 2, 24, 32, None, None, False)])


def test_other_threads_run_meanwhile() -> None:
    world = World([(0, 3000)], AttentionLayer(0, 8, 1, 64, 64, None, None, False), torch.float32)
    seconds: list[float] = []

    def attend() -> None:
        started_s = time.perf_counter()
        world.attend(Scoring(0.125), None)
        seconds.append(time.perf_counter() - started_s)

    thread = threading.Thread(target=attend)
    longest_s, last_s = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        longest_s, last_s = max(longest_s, time.perf_counter() - last_s), time.perf_counter()
    assert longest_s < seconds[0] / 2
