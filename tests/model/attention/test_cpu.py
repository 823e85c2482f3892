"""The CPU's attention, gathered and compiled, against attention by definition, over every mixture of chunks."""

import itertools
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from replicas.engine.batch import ScheduledSequence
from replicas.model.attention import gather
from replicas.model.attention.cpp import CppAttention, can_attend
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionCall, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache
from replicas.model.batch.inputs import build_inputs
from testkit.model.compiled_kernels import need_kernels, with_threads
from testkit.model.paged_cases import MIXTURES, Case, Chunks, attention_outputs, largest_error, sequences

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
KINDS = list(itertools.product([None, 1, 24, 40], [None, 5.0], [False, True]))
# Products of bfloat16 numbers are exact in float32; what is left is rounding inputs and output.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check(case: Case, backend: AttentionBackend = CppAttention) -> None:
    assert largest_error(case, backend, CPU, computes_earlier=True) < TOLERANCES[case.dtype]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("heads", "sizes"), [((4, 4), (16, 16)), ((6, 2), (16, 16)), ((4, 2), (24, 8))])
def test_gathered_equals_attention_by_definition(
    chunks: Chunks, heads: tuple[int, int], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in (("_MAX_GATHERED_SLOTS", 256), ("_SHORT_BLOCKS", 2), ("_MAX_SCORES", 2000)):
        monkeypatch.setattr(gather, limit, value)
    for window, softcap, has_sinks in KINDS:
        check(Case(chunks, heads, sizes, window, softcap, has_sinks), GatherAttention)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunks", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("heads", "sizes"), [((4, 4), (16, 16)), ((6, 2), (64, 64)), ((14, 2), (48, 32))])
def test_compiled_equals_attention_by_definition(
    chunks: Chunks, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    for window, softcap, has_sinks in KINDS:
        check(Case(chunks, heads, sizes, window, softcap, has_sinks, dtype=dtype, scale=0.1))


@pytest.mark.parametrize("backend", [GatherAttention, CppAttention])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_latent_keys_that_hold_their_values(backend: AttentionBackend, dtype: torch.dtype) -> None:
    if backend is CppAttention:
        need_kernels()
    latent = Case(heads=(20, 1), sizes=(48, 32), has_values_in_keys=True, dtype=dtype, scale=0.15)
    for chunks in (*MIXTURES.values(), ((600, 601),), ((500, 503), (270, 271))):
        check(latent.of(chunks), backend)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(8))
def test_compiled_kernel_equals_plain_attention_in_random_shapes(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.randint(1, 4)
    sizes = rng.choice([(16, 16), (32, 80), (128, 128), (96, 64), (256, 256)])
    ends = [rng.randint(1, 400) for _ in range(rng.randint(1, 5))]
    case = Case(
        tuple((rng.choice([end - 1, rng.randrange(end)]), end) for end in ends),
        (num_kv_heads * rng.randint(1, 40), num_kv_heads),
        sizes,
        window=rng.choice([None, 1, 70, 200]),
        softcap=rng.choice([None, 3.0]),
        has_sinks=rng.choice([False, True]),
        block_size=rng.choice([1, 4, 16, 48]),
        dtype=dtype,
        scale=sizes[0] ** -0.5,
    )
    check(case)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_context_is_split_between_threads(dtype: torch.dtype) -> None:
    plain = Case(heads=(6, 3), sizes=(64, 64), dtype=dtype, scale=0.125)
    with with_threads(3):
        for chunks in (((3000, 3001),), ((2000, 2003), (700, 701))):
            for kind in (plain, replace(plain, window=1500, softcap=2.0, has_sinks=True)):
                check(kind.of(chunks))


WINDOWS = {window: Case(heads=(6, 2), sizes=(64, 64), scale=0.125, window=window) for window in (None, 24, 700)}
LATENT = Case(heads=(6, 1), sizes=(48, 32), scale=0.125, has_values_in_keys=True)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("plain", [*WINDOWS.values(), LATENT], ids=[*map(str, WINDOWS), "latent"])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_output_of_a_token_depends_neither_on_neighbours_nor_on_chunks(plain: Case, num_threads: int) -> None:
    others = ((50, 51), (299, 300), (30, 75), (0, 2), *[(500, 501)] * 6)
    for end in (51, 600, 1100):
        decode, chunk = ((end - 1, end),), ((end - 40, end),)
        with with_threads(1):
            (expected,) = attention_outputs(plain.of(decode), CppAttention, CPU, computes_earlier=True)
        with with_threads(num_threads):
            for chunks in (decode, chunk, decode + others, chunk + others):
                output, *_ = attention_outputs(plain.of(chunks), CppAttention, CPU, computes_earlier=True)
                assert torch.equal(output[-1:], expected), (end, chunks)


@pytest.mark.parametrize("backend", [GatherAttention, CppAttention])
def test_only_blocks_inside_the_window_are_read(backend: AttentionBackend) -> None:
    if backend is CppAttention:
        need_kernels()
    cache = KVCache([AttentionLayer(0, 1, 1, 16, 16, 24, None, False)], 64, 16, torch.float32, CPU)
    (owner,) = sequences([400], block_size=16, num_blocks=64)
    for start, num_tokens in ((0, 395), (395, 4), (399, 1)):
        inputs = build_inputs([ScheduledSequence.of(owner, start, num_tokens)], 16, CPU)
        rows = torch.ones(num_tokens, 1, 16)
        call = AttentionCall(0, rows, rows, rows, Scoring(1.0), 24, frozenset())
        torch.testing.assert_close(backend(cache, inputs).attend(call), rows)
        # The blocks of positions 0..367, which no later token sees.
        cache[0].keys[owner.block_table[:23]] = torch.nan


def test_unsupported_head_sizes_go_to_another_backend() -> None:
    assert can_attend([Case(sizes=(48, 32)).layer])
    assert not can_attend([Case(sizes=(24, 32)).layer])


@pytest.mark.usefixtures("kernels")
def test_kernel_lets_other_threads_run() -> None:
    case = Case(((0, 3000),), heads=(8, 1), sizes=(64, 64), scale=0.125)
    thread = threading.Thread(target=attention_outputs, args=(case, CppAttention, CPU))
    started_s = last_s = time.perf_counter()
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        longest_s, last_s = max(longest_s, time.perf_counter() - last_s), time.perf_counter()
    assert longest_s < (last_s - started_s) / 2
