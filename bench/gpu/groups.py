"""Groups of the check, in the order in which they are worth the time on a device that is lent for minutes."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from bench.engine.engines import GREEDY
from bench.engine.models import GEMMA3_1B, LLAMA_1B, LLAMA_8B, random_model
from bench.gpu.device_time import StepTime, measure_decode, measure_prefill, release
from bench.gpu.items import Group, Item, Outcome, Target
from bench.gpu.model_checks import (
    AHEAD_ARCHITECTURES,
    ARCHITECTURES,
    REPLAYED_ARCHITECTURES,
    Check,
    check_ahead,
    check_architecture,
    check_rank_in_graphs,
    check_replay,
    check_sampler,
    check_threads,
    check_two_ranks,
)
from replicas.engine.config import EngineLimits
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.options import Device, Dtype, KVCacheDtype, RunnerOptions
from replicas.model.runner import TorchModelRunner
from replicas.protocol import SamplingParams
from testkit.model.paged_cases import KINDS, Chunks

LARGE_ARCHITECTURES = ("llama", "gemma2-window", "gpt_oss-window", "qwen3_moe")
PARALLEL_ARCHITECTURES = ("llama", "qwen3_moe")
COMPILED_ARCHITECTURES = ("gemma2-window", "gpt_oss-window", "qwen3_moe")
TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=512,
)  # fmt: skip
_TINY_GEMMA = Gemma3TextConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=512, max_position_embeddings=512, sliding_window=32, sliding_window_pattern=2,
)  # fmt: skip

_SAMPLED: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "temperature": SamplingParams(max_tokens=8),
    "top-p": SamplingParams(max_tokens=8, top_p=0.95),
    "top-k": SamplingParams(max_tokens=8, top_k=50),
    "min-p": SamplingParams(max_tokens=8, min_p=0.05),
    "5 logprobs": SamplingParams(max_tokens=8, temperature=0.0, logprobs=5),
    "penalties": SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "all": SamplingParams(
        max_tokens=8, top_p=0.95, top_k=50, min_p=0.05, logprobs=5, repetition_penalty=1.1, presence_penalty=0.5
    ),
}
_CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8)
_LIBRARIES = ("torch", "triton", "transformers", "flash-attn-3", "flash-attn", "flashinfer-python", "kernels")
_ATTENTION_ADVICE = "attention_backend=gather avoids these kernels; see replicas/model/attention/triton_kernels.py"
_GRAPH_ADVICE = "enforce_eager=true avoids graphs; see replicas/model/cuda_graphs/graphs.py"


def groups(target: Target) -> tuple[Group, ...]:
    """Return the groups: what must be right first, then times, then the host's share, then what may end a process."""
    parts = (_correctness, _panels, _times, _host, _parallel, _risky)
    return tuple(group for part in parts for group in part(target))


def _correctness(target: Target) -> Iterable[Group]:
    device = target.device
    names = ARCHITECTURES[:2] if target.is_tiny else ARCHITECTURES
    ahead = AHEAD_ARCHITECTURES[:1] if target.is_tiny else AHEAD_ARCHITECTURES
    attention = "gather" if target.device == "cpu" else "triton"  # The interpreter takes minutes for a model.
    yield Group("checks", "environment", (Item("versions", partial(_environment, device)),))
    yield Group("checks", "compile", (Item("kernels in parallel", partial(_compile, target), limit_s=240.0),))
    graph = _checked("captured graph", partial(_captured, device), _GRAPH_ADVICE)
    kinds = (_kernel_items, _two_sided_items, _small_items, _expert_items, _sampling_items)
    yield Group("checks", "kernels", (*(item for kind in kinds for item in kind(target)), graph))
    yield Group("checks", "recurrence", tuple(_state_items(target)))
    models = [
        _checked("built in one thread, run in another", partial(check_threads, device)),
        _checked("sampler", partial(check_sampler, device)),
        _checked("attention in torch", partial(check_architecture, ARCHITECTURES[0], device, "gather")),
    ]
    equals = [(name, partial(check_architecture, name, device, attention)) for name in names]
    models += [_checked(name, check, _ATTENTION_ADVICE) for name, check in equals]
    models += [_checked(f"{name} ahead", partial(check_ahead, name, device), _GRAPH_ADVICE) for name in ahead]
    replayed = REPLAYED_ARCHITECTURES[:1] if target.is_tiny else REPLAYED_ARCHITECTURES
    models += [_checked(f"{name} replayed", partial(check_replay, name, device), _GRAPH_ADVICE) for name in replayed]
    large = LARGE_ARCHITECTURES[:1] if target.is_tiny else LARGE_ARCHITECTURES
    checks = [(f"{name}, large steps ahead", partial(check_ahead, name, device, is_large=True)) for name in large]
    models += [_checked(name, check, _GRAPH_ADVICE) for name, check in checks]
    yield Group("checks", "models", tuple(models))
    yield Group("checks", "batch invariance", tuple(_invariance_items(target)))


def _panels(target: Target) -> Iterable[Group]:
    from bench.gpu.panel_times import (
        EXPERTS,
        FORMS,
        TINY_EXPERTS,
        check_float8_products,
        check_kept_experts,
        check_panel_products,
    )

    dtype = torch.float32 if target.is_tiny else torch.bfloat16
    advice = "a checkpoint in 16 bits avoids it; see replicas/model/layers/triton_panel_kernels.py"
    checks = {
        form: partial(check_panel_products, form, dtype, target.device, is_tiny=target.is_tiny)
        for form in list(FORMS)[: 1 if target.is_tiny else None]
    }
    checks |= {
        f"experts of {name}": partial(check_kept_experts, name, dtype, target.device, is_tiny=target.is_tiny)
        for name in (TINY_EXPERTS if target.is_tiny else EXPERTS)
    }
    checks["fp8_w8a8"] = partial(check_float8_products, dtype, target.device)
    items = tuple(_checked(form, check, advice) for form, check in checks.items())
    yield Group("panels", "panels", (*items, Item("products", partial(_panel_times, target), limit_s=240.0)))


def _panel_times(target: Target) -> Outcome:
    from bench.gpu.panel_times import measure_experts, measure_float8, measure_panels

    measures = (measure_panels, measure_experts, measure_float8)
    times = [time for measure in measures for time in measure(target.device, is_tiny=target.is_tiny)]
    detail = "; ".join(f"{time.form} {time.rows} {time.us:.0f} us ({time.bfloat16_us:.0f} in bf16)" for time in times)
    return Outcome(None, detail, {"products": list(map(asdict, times))})


def _times(target: Target) -> Iterable[Group]:
    runs = (
        ("steps", _steps), ("windows", _windows), ("prefill", _prefill), ("sampling", _sampling),
        ("recurrence", _recurrence), ("caches in 8 bits", _small_caches),
        ("batch-invariant steps", _invariant_steps), ("profile", _profile),
    )  # fmt: skip
    yield Group("times", "steps", tuple(Item(name, partial(run, target)) for name, run in runs))
    yield Group("times", "memory", (Item("memory", partial(_memory, target)),))
    yield Group("times", "start", (Item("first answer", partial(_first_answer, target), limit_s=240.0),))
    yield Group("times", "decodes", (Item("decodes", partial(_decodes, target), limit_s=300.0),))


def _host(target: Target) -> Iterable[Group]:
    yield Group("host", "host gap", (Item("gaps", partial(_host_gap, target), limit_s=240.0),))
    yield Group("host", "trace", (Item("three engines", partial(_trace, target), limit_s=300.0),))


def _parallel(target: Target) -> Iterable[Group]:
    advice = "tensor_parallel_size=1 avoids it; see replicas/model/parallel"
    checks = {"one rank in graphs": check_rank_in_graphs, "two ranks on one device": check_two_ranks}
    items = [
        _checked(f"{architecture}, {name}", partial(check, architecture, target.device), advice)
        for architecture in PARALLEL_ARCHITECTURES[: 1 if target.is_tiny else None] for name, check in checks.items()
    ]  # fmt: skip
    yield Group("parallel", "parallel", tuple(items))


def _risky(target: Target) -> Iterable[Group]:
    """Yield what compiles for a minute, and last what may end the process."""
    device, advice = target.device, "compile_layers=false avoids it"
    checks = {name: partial(check_ahead, name, device, compile_layers=True) for name in COMPILED_ARCHITECTURES}
    if device == "cuda":
        items = tuple(_checked(name, check, advice, limit_s=240.0) for name, check in checks.items())
        yield Group("compiled", "compiled layers", items)
    yield Group("compiled", "flash", (_checked("FlashAttention 3", partial(_flash, device)),))


def _checked(name: str, check: Callable[[], Check], advice: str = "", limit_s: float = 120.0) -> Item:
    def run() -> Outcome:
        found = check()
        return Outcome(found.passed, f"{found.name}: {found.detail}")

    return Item(name, run, advice, limit_s)


def _environment(device: Device) -> Outcome:
    found: dict[str, Any] = {"python": platform.python_version(), "processors": os.cpu_count()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["varlen_attn"] = find_spec("torch.nn.attention.varlen") is not None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return Outcome(None, ", ".join(f"{name} {value}" for name, value in found.items()), found)


def _kernel_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import ALL, BFLOAT16, FLOAT16, FLOAT32, IN_EVERY_DTYPE, LAYERS, check_layer

    few: dict[str, Chunks] = {"mixed": ((3, 4), (2, 9))}
    mixtures = few if target.is_tiny else ALL
    for name, layer in list(LAYERS.items())[: 2 if target.is_tiny else None]:
        dtypes = (BFLOAT16, FLOAT16, FLOAT32) if name in IN_EVERY_DTYPE else (BFLOAT16,)
        for dtype in (FLOAT32,) if target.is_tiny else dtypes:
            check = partial(check_layer, name, replace(layer, dtype=dtype), target.device, mixtures)
            yield _checked(f"{name} in {dtype}", check, _ATTENTION_ADVICE)
    advice = "kv_cache_dtype=auto avoids it; see replicas/model/attention/triton_kernels.py"
    for name in ("llama-3.1-8b",) if target.is_tiny else ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v3"):
        for cache_dtype in _CACHE_DTYPES[:1] if target.is_tiny else _CACHE_DTYPES:
            layer = replace(LAYERS[name], dtype=FLOAT32 if target.is_tiny else BFLOAT16, cache_dtype=cache_dtype)
            check = partial(check_layer, name, layer, target.device, mixtures)
            yield _checked(f"{name} with a cache in {cache_dtype}", check, advice)


def _two_sided_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import BFLOAT16, FLOAT32, TWO_SIDED, check_two_sided

    advice = "attention_backend=gather avoids it; see replicas/model/attention/two_sided_kernels.py"
    for name in ("tiny",) if target.is_tiny else TWO_SIDED:
        for dtype in (FLOAT32,) if target.is_tiny else (BFLOAT16, FLOAT32):
            yield _checked(f"two-sided {name} in {dtype}", partial(check_two_sided, name, dtype, target.device), advice)


def _small_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import BFLOAT16, FLOAT16, FLOAT32, check_small_operations

    advice = "see replicas/model/layers/triton_kernels.py"
    for dtype in (FLOAT32,) if target.is_tiny else (BFLOAT16, FLOAT16, FLOAT32):
        yield _checked(str(dtype), partial(check_small_operations, dtype, target.device), advice)


def _state_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import BFLOAT16, FLOAT32, STATES, check_recurrence

    advice = "a replica whose check fails uses plain torch; see replicas/model/attention/state_kernels.py"
    for name in ("tiny",) if target.is_tiny else STATES:
        for dtype in (FLOAT32,) if target.is_tiny else (BFLOAT16, FLOAT32):
            check = partial(check_recurrence, name, dtype, target.device)
            yield _checked(f"recurrence of {name} in {dtype}", check, advice)


def _expert_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import BFLOAT16, EXPERTS, FLOAT16, FLOAT32, check_experts

    advice = "see replicas/model/layers/triton_experts.py; a model without experts is not affected"
    names = ["tiny"] if target.is_tiny else list(EXPERTS)
    for name in names:
        dtypes = (FLOAT32,) if target.is_tiny else (BFLOAT16, FLOAT16, FLOAT32) if name == "tiny" else (BFLOAT16,)
        for dtype in dtypes:
            num_tokens = (1, 9) if target.is_tiny else (1, 33, 700)
            check = partial(check_experts, name, dtype, target.device, num_tokens)
            yield _checked(f"experts of {name} in {dtype}", check, advice)


def _sampling_items(target: Target) -> Iterable[Item]:
    from bench.gpu.kernel_checks import check_sampling_kernels, check_token_counts

    advice = "see replicas/model/sampling/triton_kernels.py; a replica whose check fails uses plain torch"
    yield _checked("sampling kernels", partial(check_sampling_kernels, target.device), advice)
    yield _checked("counts of tokens", partial(check_token_counts, target.device), advice)


def _invariance_items(target: Target) -> Iterable[Item]:
    from bench.gpu.invariance_checks import check_alone, check_invariant_attention, check_rows
    from bench.gpu.kernel_checks import BFLOAT16, FLOAT16, FLOAT32, LAYERS

    advice = "batch_invariant=false avoids it; see replicas/model/layers/batch_invariant.py"
    for dtype in (FLOAT32,) if target.is_tiny else (BFLOAT16, FLOAT16, FLOAT32):
        yield _checked(f"products in {dtype}", partial(check_rows, dtype, target.device), advice)
    layers = {"tiny": KINDS["window"]} if target.is_tiny else LAYERS
    for name, layer in layers.items():
        of_dtype = replace(layer, dtype=FLOAT32 if target.is_tiny else BFLOAT16)
        num_batches = 1 if target.is_tiny else 20
        check = partial(check_invariant_attention, name, of_dtype, target.device, num_batches)
        yield _checked(f"attention for {name}", check, advice)
    for architecture in ("llama",) if target.is_tiny else ("llama", "qwen3", "gemma2-window", "gpt2", "qwen3_moe"):
        dtype_name: Dtype = "float32" if target.is_tiny else "bfloat16"
        alone = partial(check_alone, architecture, target.device, dtype_name)
        yield _checked(f"{architecture} alone and among others", alone, advice)


def _invariant_steps(target: Target) -> Outcome:
    """Time steps with batch-invariant operations beside the same steps without."""
    if target.device == "cpu":
        return Outcome(None, "changes nothing on a processor")
    config, dtype = _model(target)
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048)
    times = []
    for is_batch_invariant in (False, True):
        loaded = replace(random_model(config, dtype, target.device), is_batch_invariant=is_batch_invariant)
        runner = build_runner(loaded, limits, RunnerOptions())
        warm_up(runner, limits)
        name = "batch-invariant " if is_batch_invariant else ""
        steps = [measure_decode(runner, size, 1024, GREEDY) for size in (1, 8, 64)]
        steps += [measure_prefill(runner, num_tokens) for num_tokens in (256, 2048)]
        times += [replace(step, step=f"{name}{step.step}") for step in steps]
        del loaded, runner
        release()
    return Outcome(None, _shown(times), {"steps": list(map(asdict, times))})


def _compile(target: Target) -> Outcome:
    """Compile the kernels of all layers in parallel; the processes of the groups then find them in Triton's cache."""
    from bench.gpu.kernel_checks import BFLOAT16, LAYERS

    if target.device == "cpu":
        return Outcome(None, "the interpreter compiles nothing")
    layers = [(name, replace(layer, dtype=BFLOAT16)) for name, layer in LAYERS.items()]
    num_processes = min(len(layers), max(1, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(_compile_layer, *zip(*layers, strict=True)) if fault]
    return Outcome(not faults, "; ".join(faults) or f"{len(layers)} layers in {num_processes} processes")


def _compile_layer(name: str, layer: Any) -> str | None:
    from bench.gpu.kernel_checks import COMPILED, check_layer

    try:
        check_layer(name, layer, "cuda", COMPILED)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _captured(device: Device) -> Check:
    from bench.gpu.kernel_checks import check_captured_graph

    if device == "cpu":
        return Check("captured graph", True, "a processor has no graphs")
    return check_captured_graph(device)


def _flash(device: Device) -> Check:
    from bench.gpu.kernel_checks import check_flash

    return check_flash(device)


def _model(target: Target) -> tuple[PretrainedConfig, torch.dtype]:
    return (TINY, torch.float32) if target.is_tiny else (LLAMA_1B, torch.bfloat16)


def _runner(target: Target, limits: EngineLimits) -> TorchModelRunner:
    config, dtype = _model(target)
    options = RunnerOptions(kv_cache_bytes=2**24)  # Ignored on a GPU, where the cache takes the memory that is left.
    runner = build_runner(random_model(config, dtype, target.device), limits, options)
    warm_up(runner, limits)
    return runner


def _steps(target: Target) -> Outcome:
    """Time steps of Llama-3.2-1B's shape."""
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=256 if target.is_tiny else 2048)
    runner = _runner(target, limits)
    sizes, context, chunks = ((1, 4), 100, (64,)) if target.is_tiny else ((1, 8, 32, 64, 256), 1024, (512, 2048))
    times = [measure_decode(runner, size, context, GREEDY) for size in sizes if size <= limits.max_num_seqs]
    times.append(measure_decode(runner, sizes[1], context, SamplingParams(max_tokens=8, top_p=0.95)))
    times += [measure_prefill(runner, num_tokens) for num_tokens in chunks]
    return Outcome(None, _shown(times), {"steps": list(map(asdict, times))})


def _small_caches(target: Target) -> Outcome:
    """Time decodes of long sequences of Llama-3.1-8B's shape with a KV cache in each format."""
    from bench.gpu.kernel_times import SHAPES

    config, dtype = (TINY, torch.float32) if target.is_tiny else (SHAPES["Llama-3.1-8B"], torch.bfloat16)
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=256 if target.is_tiny else 2048)
    size, context = (4, 100) if target.is_tiny else (64, 8192)
    loaded = random_model(config, dtype, target.device)
    formats: tuple[KVCacheDtype, ...] = ("auto", "fp8", "int8")
    times = []
    for cache in formats:
        runner = build_runner(loaded, limits, RunnerOptions(kv_cache_bytes=2**24, kv_cache_dtype=cache))
        warm_up(runner, limits)
        step = measure_decode(runner, size, context, GREEDY)
        times.append(replace(step, step=f"cache {cache} {step.step}"))
        del runner
        release()
    return Outcome(None, _shown(times), {"steps": list(map(asdict, times))})


def _windows(target: Target) -> Outcome:
    """Time decodes of Gemma 3 1B's shape, whose layers have several block tables."""
    config, dtype = (_TINY_GEMMA, torch.float32) if target.is_tiny else (GEMMA3_1B, torch.bfloat16)
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=256 if target.is_tiny else 2048)
    runner = build_runner(random_model(config, dtype, target.device), limits, RunnerOptions(kv_cache_bytes=2**24))
    warm_up(runner, limits)
    sizes, context = ((1, 4), 100) if target.is_tiny else ((1, 64), 4096)
    times = [measure_decode(runner, size, context, GREEDY) for size in sizes]
    detail = f"{len(runner.windows)} tables; {_shown(times)}"
    return Outcome(len(runner.windows) > 1, detail, {"steps": list(map(asdict, times))})


def _shown(times: Iterable[StepTime]) -> str:
    return "; ".join(f"{step.step} {step.median_ms:.2f} ms ({step.tokens_per_s:.0f} tokens/s)" for step in times)


def _prefill(target: Target) -> Outcome:
    from bench.gpu.kernel_times import measure_prefills

    times = measure_prefills(target.device, is_tiny=target.is_tiny)
    return Outcome(None, "; ".join(time.describe() for time in times), {"prefills": list(map(asdict, times))})


def _sampling(target: Target) -> Outcome:
    from bench.gpu.kernel_times import measure_sampling

    rows, vocab_size = ((1, 4), 1000) if target.is_tiny else ((1, 64, 256), 128_256)
    times = measure_sampling(target.device, _SAMPLED, rows, vocab_size)
    detail = "; ".join(f"{name} {text} ms" for name, text in times.items())
    return Outcome(None, detail, {"sampling_ms": times})


def _recurrence(target: Target) -> Outcome:
    """Time one recurrent layer: the gated delta rule, then Mamba-2."""
    from bench.gpu.kernel_checks import STATES
    from bench.gpu.kernel_times import measure_recurrence

    if target.device == "cpu":
        return Outcome(None, "needs a GPU's clock")
    times = measure_recurrence(target.device, {name: STATES[name] for name in ("qwen3.5-4b", "nemotron-h-8b")})
    return Outcome(None, "; ".join(f"{name} {text} ms" for name, text in times.items()), {"recurrence_ms": times})


def _memory(target: Target) -> Outcome:
    """Compare the share of the memory that a runner may take with that which it takes after a few steps."""
    if target.device == "cpu":
        return Outcome(None, "a processor's cache has a fixed size")
    share = 0.5
    config, dtype = _model(target)
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=2048)
    options = RunnerOptions(gpu_memory_utilization=share)
    runner = build_runner(random_model(config, dtype, target.device), limits, options)
    warm_up(runner, limits)
    for size in (1, 32, 256):
        measure_decode(runner, size, 512, SamplingParams(max_tokens=8, top_p=0.95))
    free, total = torch.cuda.mem_get_info()
    figures = {"share_bytes": int(share * total), "used_bytes": total - free, "blocks": runner.num_blocks}
    used = (total - free) / total
    return Outcome(used <= share + 0.02, f"{used:.1%} of the memory is used, {share:.0%} were allowed", figures)


def _first_answer(target: Target) -> Outcome:
    """Time two starts of an 8B model, with what takes the time."""
    from bench.gpu.first_answer import ALL, measure_first_answers

    config, dtype = (TINY, torch.float32) if target.is_tiny else (LLAMA_8B, torch.bfloat16)
    seconds = measure_first_answers(config, dtype, target.device, is_tiny=target.is_tiny)
    texts = (
        f"{times[ALL]:.1f} s with the kernels' cache {name}: "
        + ", ".join(f"{phase} {time:.1f}" for phase, time in times.items() if phase != ALL)
        for name, times in seconds.items()
    )
    return Outcome(None, "; ".join(texts), {"first_answer_s": seconds})


def _profile(target: Target) -> Outcome:
    """Trace some decodes; the trace and the operators that take longest are left beside the output."""
    from bench.gpu.device_time import profiled

    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=256 if target.is_tiny else 2048)
    runner = _runner(target, limits)
    table, trace = profiled(runner, 4 if target.is_tiny else 64, 100 if target.is_tiny else 1024, target.output)
    return Outcome(None, f"see {trace.name}", {"operators": table})


def _decodes(target: Target) -> Outcome:
    """Compare decodes of three models' shapes with the device's bandwidth."""
    if target.device == "cpu":
        return Outcome(None, "needs a GPU's clock")
    from bench.gpu.kernel_times import copy_bandwidth, measure_decodes

    bandwidth = copy_bandwidth(torch.device(target.device))
    decodes = measure_decodes(target.device, bandwidth)
    figures = {"copy_bytes_per_s": bandwidth, "decodes": list(map(asdict, decodes))}
    return Outcome(None, "; ".join(decode.describe() for decode in decodes), figures)


def _host_gap(target: Target) -> Outcome:
    if target.device == "cpu":
        return Outcome(None, "needs a GPU's clock")
    from bench.gpu.host_gap import measure_all

    gaps = measure_all(lambda: random_model(LLAMA_1B, torch.bfloat16, target.device))
    return Outcome(None, "; ".join(gap.describe() for gap in gaps), {"host_gaps": list(map(asdict, gaps))})


def _trace(target: Target) -> Outcome:
    if target.device == "cpu":
        return Outcome(None, f"needs a GPU; transformers {transformers.__version__}")
    from bench.gpu.mixed_trace import measure_trace, plain_model

    gc.collect()
    outcomes = measure_trace(
        lambda: random_model(LLAMA_1B, torch.bfloat16, target.device),
        lambda: plain_model(LLAMA_1B, torch.bfloat16, target.device),
    )
    return Outcome(None, "; ".join(each.describe() for each in outcomes), {"trace": list(map(asdict, outcomes))})
