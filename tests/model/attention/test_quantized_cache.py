"""Keys and values in 8 bits: attention over the cache's numbers, and tokens that depend on their request alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend, AttentionSpec
from replicas.model.attention.kv_cache import AttentionLayer, KVCache, bytes_per_block, quantize
from replicas.model.attention.select import check_attention, choose_attention
from replicas.model.build import build_runner
from replicas.model.hardware.device import choose_cache_dtype
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import Dtype, Quantization, RunnerOptions
from replicas.protocol import GenerateRequest, SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.compiled_kernels import need_kernels
from testkit.model.engine_runs import (
    Sizes,
    build_engine,
    load,
    load_compiled,
    log_probabilities,
    num_preemptions,
    random_prompts,
    requests_for,
    run,
    tokens,
)
from testkit.model.paged_cases import KINDS, MIXTURES, Case, largest_error
from testkit.model.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
TYPES = (torch.int8, torch.float8_e4m3fn)
STEPS = {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16}
"""Largest rounding error of a number: of the head's largest, or of the number itself."""
CASES = {
    "plain": Case(heads=(6, 2), sizes=(64, 64), scale=0.125),
    "all": Case(heads=(6, 2), sizes=(48, 32), window=40, softcap=5.0, has_sinks=True, block_size=5),
    "latent": Case(heads=(6, 1), sizes=(48, 32), has_values_in_keys=True),
}


@pytest.mark.parametrize("type_", TYPES)
def test_rounding_errors_are_those_of_the_type(type_: torch.dtype) -> None:
    heads = (
        torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 50)[:, None, None]
    )
    heads[7] = 0.0
    numbers, scales = quantize(heads, type_)
    largest = heads.abs().amax(-1, keepdim=True)
    errors = (numbers.float() * scales[..., None] - heads).abs()
    size = largest if type_ == torch.int8 else heads.abs() + largest / 448 / 4
    assert bool((errors <= 1.001 * STEPS[type_] * size).all()) and not numbers[7].float().any()
    for wrong in (torch.nan, torch.inf):
        heads[3, 1, 5] = wrong
        assert not quantize(heads, type_)[1][3].isfinite().all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("type_", TYPES)
def test_a_cleared_block_has_no_trace_of_numbers_that_are_not_finite(type_: torch.dtype, wrong: float) -> None:
    layer = KVCache([AttentionLayer(0, 2, 2, 16, 16, None, None, False)], 1, 16, type_, CPU)[0]
    heads = torch.ones(1, 2, 16)
    heads[0, 1, 5] = wrong
    layer.write(torch.tensor([16]), heads, heads)
    block = torch.tensor([1])
    assert not any(part.isfinite().all() for part in layer.read(block, torch.float32))
    layer.clear(block)
    assert not any(part.any() for part in layer.read(block, torch.float32))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_", TYPES)
def test_the_kernel_stores_what_plain_torch_stores(type_: torch.dtype, dtype: torch.dtype) -> None:
    layer, slots = AttentionLayer(0, 2, 2, 64, 32, None, None, False), torch.arange(20, 40)
    plain, compiled = (KVCache([layer], 3, 16, type_, CPU)[0] for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(20, 2, size, generator=generator) * torch.logspace(-3, 0, size) for size in (64, 32))
    key, value = (part.to(dtype) for part in (key, value))
    plain.write(slots, key, value)
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    torch.ops.headway.attend_paged(
        key, key, value, compiled.keys, compiled.values, compiled.key_scales, compiled.value_scales, slots, nothing,
        nothing[:, 0], 1.0, 0, 0.0, None,
    )  # fmt: skip
    for (expected, scales), (found, found_scales) in zip(plain.parts, compiled.parts, strict=True):
        assert torch.equal(scales, found_scales) and scales.any()
        # Compilers join a product and a sum. Rounded once, it may fall on the other side of the middle of two numbers.
        different = expected.view(torch.int8) != found.view(torch.int8)
        assert different.float().mean() < 0.001


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", [GatherAttention, CppAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_", TYPES)
def test_attention_is_that_over_the_numbers_of_the_cache(
    type_: torch.dtype, dtype: torch.dtype, backend: AttentionBackend
) -> None:
    if backend is CppAttention:
        need_kernels()
    bound = 3e-2 if dtype == torch.bfloat16 else 2e-5
    for case in CASES.values():
        for chunks in MIXTURES.values():
            whole = replace(case, cache_dtype=type_, dtype=dtype)
            assert largest_error(whole.of(chunks), backend, CPU, computes_earlier=True) < bound


@pytest.mark.usefixtures("kernels")
def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec((KINDS["window"].layer,), 16, 512, torch.float32, CPU, True, torch.int8)
    assert check_attention(spec, [CppAttention]) is None
    attend = torch.ops.headway.attend_paged.default

    def forget_the_scales(*given: object) -> object:
        return attend(*given[:5], *(part.clone() for part in given[5:7]), *given[7:])  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.ops.headway.attend_paged, "default", forget_the_scales)
    assert "differs from plain torch" in (check_attention(spec, [CppAttention]) or "")


def test_flash_attention_is_refused() -> None:
    spec = AttentionSpec((KINDS["plain"].layer,), 16, 512, torch.float32, CPU, quantized_cache=torch.int8)
    with pytest.raises(
        ModelLoadError, match="'flash', which does not work here: it does not read a KV cache in 8 bits"
    ):
        choose_attention(spec, "flash")
    with pytest.raises(ModelLoadError, match="kv_cache_dtype is 'fp4'; it must be one of auto, fp8, int8"):
        choose_cache_dtype("fp4", torch.bfloat16)


PROMPTS = random_prompts((5, 33, 60, 90))
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
WHOLE = Sizes(max_num_batched_tokens=512)
# Of blocks of 4, the prompts take 49 and the finished sequences 65.
TIGHT = Sizes(num_blocks=54, block_size=4)


def check_one_output(loaded: LoadedModel, attention: AttentionBackend, type_: torch.dtype) -> None:
    """Check that neighbours, chunks, prefix hits and preemptions change no token."""
    alone = build_engine(loaded, WHOLE, attention, cache_dtype=type_)
    expected = [tokens(alone, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert len({token for output in expected for token in output}) >= 15
    for sizes in (Sizes(max_num_batched_tokens=20), Sizes(), TIGHT):
        engine = build_engine(loaded, sizes, attention, cache_dtype=type_)
        for _ in range(2):
            requests = requests_for(PROMPTS, GREEDY)
            outputs = run(engine, requests)
            assert [list(output.token_ids) for output in outputs] == expected
        if sizes is TIGHT:
            assert num_preemptions(engine) > 0
        else:
            assert [output.usage.cached_tokens for output in outputs] == [0, 32, 48, 80]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization", "type_"),
    [
        ("llama", "bfloat16", "none", torch.int8),
        ("llama", "bfloat16", "int4", torch.float8_e4m3fn),
        ("qwen3", "float32", "none", torch.float8_e4m3fn),
        ("gemma2-window", "bfloat16", "none", torch.int8),
        ("gpt_oss-window", "float32", "none", torch.int8),
        ("minicpm3", "bfloat16", "none", torch.int8),
    ],
)
def test_output_depends_on_the_request_alone(
    architecture: str, dtype: Dtype, quantization: Quantization, type_: torch.dtype
) -> None:
    check_one_output(load_compiled(cached_checkpoint(architecture), dtype, quantization), CppAttention, type_)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("type_", TYPES)
def test_output_depends_on_the_request_alone_in_plain_torch(type_: torch.dtype) -> None:
    check_one_output(load(cached_checkpoint("deepseek_v3")), GatherAttention, type_)


@pytest.mark.parametrize(("type_", "bound"), [(torch.int8, 0.2), (torch.float8_e4m3fn, 0.6)])
def test_log_probabilities_are_near_those_of_a_cache_without_rounding(type_: torch.dtype, bound: float) -> None:
    loaded = load(cached_checkpoint("llama"))
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=512)
    plain, quantized = (
        torch.stack(
            [
                log_probabilities(output)
                for output in run(build_engine(loaded, cache_dtype=each), requests_for(PROMPTS, params))
            ]
        )
        for each in (None, type_)
    )
    difference = float((plain - quantized).abs().max())
    assert 0 < difference < bound


@pytest.mark.sampled(2)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(
    ("load_poisoned", "attention"), [(load, GatherAttention), (load_compiled, CppAttention)], ids=["plain", "compiled"]
)
def test_a_sequence_with_nan_fails_alone(
    tmp_path: Path, load_poisoned: Callable[[Path], LoadedModel], attention: AttentionBackend, type_: torch.dtype
) -> None:
    if attention is CppAttention:
        need_kernels()
    path, poison = write_checkpoint(tmp_path, with_tokenizer=False), 2  # No random prompt has this token.
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    prompts = random_prompts((9, 21, 35, 18, 7), seed=8)
    loaded = load_poisoned(path)
    expected = tokens(build_engine(loaded, WHOLE, attention, cache_dtype=type_), prompts, GREEDY)
    engine = build_engine(loaded, Sizes(num_blocks=12, max_num_seqs=4), attention, cache_dtype=type_)
    for number in range(2):
        requests = [GenerateRequest(f"{number}-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
        poisoned = GenerateRequest(f"{number}-bad", (*prompts[2][:20], poison, *prompts[2][:20]), GREEDY)
        bad, *outputs = run(engine, [poisoned, *requests])
        assert bad.error is not None and "not finite" in bad.error.message
        assert [list(output.token_ids) for output in outputs] == expected


def test_about_twice_as_many_blocks_fit() -> None:
    layers = [AttentionLayer(index, 32, 8, 128, 128, None, None, False) for index in range(2)]
    wide, narrow = (bytes_per_block(layers, 16, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert wide / narrow == pytest.approx(2 / (1 + 4 / 128))
    loaded = load(cached_checkpoint("llama"), "bfloat16")
    plain, quantized = (
        build_runner(loaded, EngineLimits(), RunnerOptions(kv_cache_bytes=10**6, kv_cache_dtype=name))
        for name in ("auto", "fp8")
    )
    assert quantized.num_blocks > 1.5 * plain.num_blocks  # Heads of 16 numbers have a scale of 4 bytes.
    assert (plain.cache_dtype, quantized.cache_dtype) == ("bfloat16", "fp8")
