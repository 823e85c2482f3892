"""Triton's kernels against attention by definition and plain torch, and models that run on them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

import torch
import triton as gpu
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu.kernel_checks import check_layer
from replicas.model.attention import triton
from replicas.model.attention.flash import FlashBackend
from replicas.model.attention.interface import AttentionCall, AttentionSpec, Scoring
from replicas.model.attention.kv_cache import AttentionLayer, KVCache, LayerCache
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from replicas.model.attention.select import check_attention, choose_attention
from replicas.model.attention.triton import TritonBackend
from replicas.model.attention.triton_kernels import widened
from replicas.model.batch.inputs import build_inputs, dummy_item
from replicas.model.hardware.device import compute_capability
from replicas.model.layers.fused_decoder import FusedDecoder
from replicas.model.layers.optimize import cuda_modules, optimize_model
from replicas.model.layers.triton_ops import TritonLayerOps, check_layer_ops
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    check_equals_generate,
    load,
    load_unoptimized,
    num_preemptions,
    random_prompts,
    run,
)
from testkit.model.paged_cases import (
    KINDS,
    MIXTURES,
    TOLERANCES,
    Case,
    Chunks,
    attend_by_definition,
    flash_attn_with_kvcache,
    largest_error,
)
from testkit.model.tiny_checkpoints import write_checkpoint
from tests.model.cuda_graphs.test_steps_ahead import check_same

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
CAPABILITY = compute_capability(CPU)


def check(case: Case, num_processors: int) -> None:
    """With `num_processors` pretended: many of them make the kernels divide the keys, few as they are, into parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_MIN_PART_KEYS", 16)
        assert largest_error(case, TritonBackend(num_processors, CAPABILITY), CPU) < TOLERANCES[case.dtype]


# An interpreter takes its time: the mixtures of the other tests for one kind only.
SMALL: Chunks = ((70, 71), (0, 1), (0, 6), (13, 50))


@pytest.mark.parametrize("chunks", MIXTURES.values(), ids=MIXTURES)
def test_equals_attention_by_definition(chunks: Chunks) -> None:
    check(KINDS["plain"].of(chunks), num_processors=0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_layer(kind: Case) -> None:
    check(kind.of(SMALL), num_processors=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["plain", "all", "sizes-24-8", "float16", "latent"])
def test_a_cache_in_8_bits(kind: str, cache_dtype: torch.dtype) -> None:
    case = replace(KINDS[kind].of(SMALL), cache_dtype=cache_dtype)
    for computes_earlier in (False, True):  # Plain torch stores the earlier keys, or the kernel.
        assert largest_error(case, TritonBackend(0, CAPABILITY), CPU, computes_earlier) < TOLERANCES[case.dtype]
    check(case.of(((99, 100),)), num_processors=8)


@gpu.jit
def _widen_codes(codes, output, IS_FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, 256)
    numbers = widened(tl.load(codes + lanes), output.dtype.element_ty, IS_FLOAT8)
    tl.store(output + lanes, numbers)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_all_bytes_of_a_cache_are_widened_exactly(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype)
    found = torch.empty(256, dtype=dtype)
    _widen_codes[(1,)](codes.view(torch.int8), found, IS_FLOAT8=cache_dtype != torch.int8)
    expected = codes.float() / (1 if cache_dtype == torch.int8 else 256)
    is_stored = expected.isfinite() & (expected != -128)  # `quantize` makes no others.
    assert torch.equal(found.float()[is_stored], expected[is_stored])


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_in_8_bits_of_a_model_in_bfloat16(cache_dtype: torch.dtype) -> None:
    case = replace(KINDS["plain"].of((*SMALL, (299, 300))), dtype=torch.bfloat16, cache_dtype=cache_dtype)
    for capability in (80, 89):  # Their tiles have different numbers of keys.
        assert largest_error(case, TritonBackend(0, capability), CPU) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_large_values_of_float16_do_not_overflow_in_8_bits(cache_dtype: torch.dtype) -> None:
    layer, largest = KINDS["float16"].layer, 60_000.0
    some = torch.zeros(5, layer.num_kv_heads, layer.key_size, dtype=torch.float16)
    query, value = some.repeat(1, layer.num_query_heads // layer.num_kv_heads, 1), torch.full_like(some, largest)
    call = AttentionCall(0, query, some, value, Scoring(1.0), None, frozenset())
    cache, inputs = KVCache([layer], 1, 16, cache_dtype, CPU), build_inputs([dummy_item(0, 5, 16)], 16, CPU)
    output = TritonBackend(0, CAPABILITY)(cache, inputs).attend(call)
    torch.testing.assert_close(output, torch.full_like(output, largest), rtol=1e-2, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["plain", "all", "group-of-7", "latent"])
@pytest.mark.parametrize("num_processors", [4, 12])
def test_keys_divided_into_parts(kind: str, num_processors: int) -> None:
    check(KINDS[kind].of(((399, 400), (3, 4), (150, 157))), num_processors)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 3))
    starts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=3))
    return Case(
        chunks=tuple((start, start + draw(st.sampled_from([1, 1, 2, 9, 40]))) for start in starts),
        heads=(num_kv_heads * draw(st.integers(1, 9)), num_kv_heads),
        sizes=(draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        window=draw(st.none() | st.integers(1, 200)),
        softcap=draw(st.none() | st.floats(0.5, 60.0)),
        has_sinks=draw(st.booleans()),
        block_size=draw(st.integers(1, 33)),
    )


@given(cases(), st.sampled_from([0, 2, 8]))
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
def test_any_shape(case: Case, num_processors: int) -> None:
    check(case, num_processors)


def test_flash_attention_stores_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    num_written: list[int] = []

    def write(layer: LayerCache, slots: torch.Tensor, call: AttentionCall) -> None:
        TritonBackend.write(layer, slots, call)
        num_written.append(len(slots))

    backend = FlashBackend(torch.float32, CPU, write)
    assert largest_error(KINDS["plain"].of(SMALL), backend, CPU) < TOLERANCES[torch.float32]
    assert num_written


def test_a_plan_of_reused_tensors_sees_their_new_values() -> None:
    """As a captured graph is replayed: the plan's tensors stay, their values and the cache's change."""
    cache = KVCache([AttentionLayer(0, 4, 2, 16, 16, None, None, False)], 8, 16, torch.float32, CPU)
    cache[0].keys.normal_(generator=torch.Generator().manual_seed(0))
    cache[0].values.normal_(generator=torch.Generator().manual_seed(1))
    chunks, tables, slots = (torch.zeros(shape, dtype=torch.int32) for shape in ((3, 4), (3, 4), (3,)))
    row = torch.randn(3, 4, 16)
    kept = cache[0].keys.clone(), cache[0].values.clone()
    # Two sequences and a row of padding, then other blocks and positions, then all padding.
    for positions, blocks in (((20, 5), ((3, 1), (7, 0))), ((40, 17), ((2, 5, 6), (4, 8))), ((), ())):
        for tensor in (tables, slots):
            tensor.zero_()
        chunks[:] = torch.tensor([(index, 0, 1, -1) for index in range(3)])
        for index, position in enumerate(positions):
            chunks[index] = torch.tensor([index, position, 1, index], dtype=torch.int32)
            tables[index, : len(blocks[index])] = torch.tensor(blocks[index])
            slots[index] = tables[index, position // 16] * 16 + position % 16
        call = AttentionCall(0, row, row[:, :2], row[:, 2:], Scoring(0.25), None, frozenset())
        plan = AttentionPlan(ChunkGroup(chunks, tables, num_tokens=3, longest=300))  # Its work is a graph's part, too.
        output = TritonBackend(500, CAPABILITY).planned(cache, slots.long(), plan).attend(call)
        assert not output[len(positions) :].any()
        for index, position in enumerate(positions):
            keys, values = (
                part[tables[index].long()].flatten(0, 1)[: position + 1] for part in (cache[0].keys, cache[0].values)
            )
            expected = attend_by_definition(row[index : index + 1], keys, values, call.scoring, None)
            torch.testing.assert_close(output[index : index + 1].double(), expected, atol=1e-5, rtol=1e-5)
    used = {0, 1, 6, 7, 8}  # Scratch, and the blocks that hold the positions above.
    for part, before in zip((cache[0].keys, cache[0].values), kept, strict=True):
        for block in set(range(9)) - used:
            torch.testing.assert_close(part[block], before[block], atol=0, rtol=0)


LAYERS = [
    AttentionLayer(0, 4, 2, 16, 16, None, None, False),
    AttentionLayer(1, 4, 2, 16, 16, 24, 5.0, True),
]


def test_right_kernels_pass_the_check() -> None:
    backends = [TritonBackend(0, CAPABILITY), TritonBackend(4096, CAPABILITY)]
    assert check_attention(AttentionSpec(LAYERS[1:], 16, 512, torch.float16, CPU), backends) is None


def test_wrong_kernels_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    write = triton.write_keys_and_values

    def forget_the_first(layer, shape, slots, call):
        write(layer, shape, slots.clamp(min=int(slots.min()) + 1), call)

    spec = AttentionSpec(LAYERS[:1], 16, 512, torch.float32, CPU)
    for wrong in (forget_the_first, lambda *_: None):
        monkeypatch.setattr(triton, "write_keys_and_values", wrong)
        fault = check_attention(spec, [TritonBackend(0, CAPABILITY)])
        assert fault is not None and "differs from plain torch" in fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_small_operations_equal_plain_torch(dtype: torch.dtype) -> None:
    assert check_layer_ops(dtype, CPU) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("operation", ["add_and_normalize", "rotary_embedding", "silu_and_mul"])
def test_a_wrong_small_operation_fails_the_check(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(TritonLayerOps, operation)

    def with_a_wrong_number(*arguments: object) -> torch.Tensor | None:
        result: torch.Tensor | None = right(*arguments)
        changed = arguments[1] if result is None else result
        assert isinstance(changed, torch.Tensor)
        changed[-1, 3] += 1
        return result

    monkeypatch.setattr(TritonLayerOps, operation, with_a_wrong_number)
    fault = check_layer_ops(torch.float32, CPU)
    assert fault is not None and operation in fault


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("architecture", "is_fused"), [("llama", True), ("qwen3", True), ("gemma2-window", False)])
def test_a_model_with_the_parts_of_a_gpu_equals_generate(tmp_path: Path, architecture: str, is_fused: bool) -> None:
    path = write_checkpoint(tmp_path, architecture, with_tokenizer=False)
    loaded = load_unoptimized(path)
    modules = cuda_modules(torch.float32, CPU)
    assert isinstance(modules.ops, TritonLayerOps)
    optimize_model(loaded.model, loaded.port, loaded.layers, modules)
    assert isinstance(loaded.model.model, FusedDecoder) is is_fused
    engine = build_engine(loaded, Sizes(max_num_batched_tokens=20))
    check_equals_generate(engine, path, random_prompts((5, 30)), max_tokens=5)


@pytest.mark.deep  # The padded steps below run the same kernels in an engine.
def test_equals_generate(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", with_tokenizer=False)
    loaded = load(path)
    engine = build_engine(
        loaded, Sizes(max_num_batched_tokens=20), choose_attention(loaded.attention_spec(16), "triton")
    )
    check_equals_generate(engine, path, random_prompts((5, 22)), max_tokens=3)


def test_the_gpu_check_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    mixtures: dict[str, Chunks] = {"some": ((3, 4), (2, 9))}
    right = check_layer("tiny", KINDS["plain"], "cpu", mixtures)
    assert right.passed and "tiny" in right.name
    monkeypatch.setattr(triton, "write_keys_and_values", lambda *_: None)
    wrong = check_layer("tiny", KINDS["plain"], "cpu", mixtures)
    assert not wrong.passed and "largest error" in wrong.detail


DECODED = (
    SamplingParams(max_tokens=14, temperature=0.0),
    SamplingParams(max_tokens=12, top_p=0.9, seed=3, logprobs=1),
    SamplingParams(max_tokens=6, seed=6, stop_token_ids=tuple(range(40, 80)), min_tokens=2),
)
# Of blocks of 4, the prompts take 18, with one to grow for each, and the finished sequences 28.
PREEMPTING = Sizes(num_blocks=22, block_size=4, max_num_seqs=5)


@pytest.mark.parametrize(
    ("architecture", "num_processors"), [pytest.param("llama", 132, marks=pytest.mark.deep), ("gpt_oss-window", 1)]
)
def test_padded_steps_give_the_tokens_of_plain_steps(tmp_path: Path, architecture: str, num_processors: int) -> None:
    loaded = load(write_checkpoint(tmp_path, architecture))
    requests = [
        GenerateRequest(f"request-{number}", prompt, DECODED[number % len(DECODED)])
        for number, prompt in enumerate(random_prompts((5, 18, 9, 30)))
    ]
    expected = run(build_engine(loaded), requests)
    backend = TritonBackend(num_processors, CAPABILITY)
    engine = build_engine(loaded, PREEMPTING, backend, backend.planned, is_ahead=True)
    check_same(run(engine, requests), expected)
    assert num_preemptions(engine) > 0
