"""Checks of `headway doctor` that need torch, made in a process of their own, and the memory of a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from replicas.errors import ModelLoadError
from replicas.model.hardware.limits import available_memory_bytes
from replicas.model.loading.facts import choose_state_slots, state_bytes
from replicas.model.loading.memory import GpuWeights, replica_memory, weights_on_gpu
from serve_app.cli.checks.machine_checks import Check, Status
from serve_app.cli.clients.terminal import stderr
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.models.torch_process import run_module

Diagnosis = Mapping[str, Any]
"""Fields of `replicas.model.diagnosis.Diagnosis`."""
_MODULE = "replicas.model.diagnosis"
_CPU_LIMIT_S = 600.0


def diagnosis_checks(directory: Path | None, num_ranks: int = 1) -> Iterator[Check]:
    """Yield the checks of the kernels, and of the memory of the model in `directory` on `num_ranks` ranks."""
    with stderr().status("Checking the kernels; the first time they are compiled, which takes a minute ..."):
        diagnosis = _diagnose(directory, num_ranks)
    if isinstance(diagnosis, Check):
        yield diagnosis
        return
    yield device_check(diagnosis, has_driver=shutil.which("nvidia-smi") is not None)
    if num_ranks > 1 and diagnosis["is_gpu"]:
        yield ranks_check(diagnosis, num_ranks)
    for kernels in diagnosis["kernels"]:
        yield _kernel_check(kernels["name"], kernels["fault"])
    if diagnosis["model_fault"] is not None:
        yield Check("model", Status.FAIL, diagnosis["model_fault"], "choose another model")
    elif directory is not None:
        yield from memory_checks(directory, diagnosis, num_ranks)


def device_check(diagnosis: Diagnosis, has_driver: bool) -> Check:
    """Check that torch uses the GPU if there is a driver for one."""
    finding = f"{diagnosis['device']}, {diagnosis['dtype']}"
    if has_driver and not diagnosis["is_gpu"]:
        return Check("device", Status.WARN, f"{finding}; torch finds no GPU", "install torch for the driver's CUDA")
    return Check("device", Status.OK, finding)


def ranks_check(diagnosis: Diagnosis, num_ranks: int) -> Check:
    """Check that there is a GPU for each rank."""
    needed = (
        f"needs {num_ranks} GPUs of {decimal(diagnosis['gpu_memory_bytes'])}, this node has {diagnosis['num_gpus']}"
    )
    if diagnosis["num_gpus"] < num_ranks:
        return Check("GPUs", Status.FAIL, needed, "lower tensor_parallel_size: a replica does not span nodes")
    return Check("GPUs", Status.OK, needed)


def memory_checks(directory: Path, diagnosis: Diagnosis, num_ranks: int = 1) -> Iterator[Check]:
    """Yield the sizes of a model's weights and KV cache, their sum beside the free memory, and a bound of the speed.

    Sizes of a KV cache are those of each of `num_ranks` ranks, with a GPU those of weights, too.
    """
    options = HeadwayConfig(model=str(directory), tensor_parallel_size=num_ranks).replica_options()
    try:
        on_gpu = weights_on_gpu(
            directory, diagnosis["dtype"], diagnosis["value_bytes"], keeps_bits=diagnosis["keeps_bits"]
        )
        on_cpu = replica_memory(directory, options.model, options.runner, options.limits)
    except ModelLoadError as error:
        yield Check("weights", Status.FAIL, str(error), "fetch the model again")
        return
    weight_bytes, form = on_cpu.weights, diagnosis["dtype"]
    if diagnosis["is_gpu"]:
        held = on_gpu if diagnosis["part"] is None else GpuWeights(**diagnosis["part"])
        weight_bytes = held.num_bytes
        form = f"{held.description}; with quantization=fp8 {decimal(held.num_bytes_in_fp8)}"
        if num_ranks > 1:
            form += f", cut for {num_ranks} GPUs"
    yield Check("weights", Status.OK, f"{decimal(weight_bytes)} ({on_gpu.num_values:,} weights, {form})")
    has_cache = bool(diagnosis["model"]["kv_bytes_per_token"])
    if has_cache and not diagnosis["model"]["has_experts"]:
        yield _speed_check(weight_bytes, diagnosis["read_bytes_per_s"])
    if diagnosis["is_gpu"]:
        free = int(diagnosis["gpu_memory_bytes"] * options.runner.gpu_memory_utilization)
        cache_bytes = max(0, free - weight_bytes) if has_cache else 0
        total = weight_bytes + cache_bytes
    else:
        free, cache_bytes, total = available_memory_bytes(), on_cpu.kv_cache // num_ranks, on_cpu.total
    slot_bytes = diagnosis["model"]["state_slot_bytes"]
    if slot_bytes:
        finding, has_gpu = f"{decimal(cache_bytes)} for KV cache and recurrent state", diagnosis["is_gpu"]
        try:
            num_slots = choose_state_slots(cache_bytes, slot_bytes, options.limits, finding, has_gpu=has_gpu)
        except ModelLoadError as error:
            yield Check("recurrent state", Status.FAIL, str(error), "raise kv_cache_bytes or gpu_memory_utilization")
            return
        cache_bytes -= state_bytes(num_slots, slot_bytes)
        yield Check("recurrent state", Status.OK, f"{num_slots} slots of {decimal(slot_bytes)}")
    yield _cache_check(cache_bytes, diagnosis)
    needed = f"{decimal(total)} of {decimal(free)} that are free"
    if total > free:
        yield Check("model's memory", Status.FAIL, needed, "choose a smaller model, or lower kv_cache_bytes")
    else:
        yield Check("model's memory", Status.OK, needed)


def _speed_check(weight_bytes: int, read_bytes_per_s: float) -> Check:
    """Describe the bound of one request's speed: each of its tokens reads all weights from memory."""
    tokens = f"at most {read_bytes_per_s / weight_bytes:,.3g} tokens/s of one request"
    speed = f"{decimal(int(read_bytes_per_s))}/s"
    return Check("speed", Status.OK, f"{tokens}: each token reads the weights, and memory is read at {speed}")


def _cache_check(cache_bytes: int, diagnosis: Diagnosis) -> Check:
    per_token, longest = diagnosis["model"]["kv_bytes_per_token"], diagnosis["model"]["max_model_len"]
    if not per_token:
        return Check("KV cache", Status.OK, "none: the model computes a text in one step")
    num_tokens, longest_bytes = cache_bytes // per_token, diagnosis["model"]["kv_bytes_of_longest"]
    finding = (
        f"about {decimal(cache_bytes)}: {num_tokens:,} tokens of {decimal(per_token)}, "
        f"or {cache_bytes / longest_bytes:.1f} requests of {longest:,} tokens; "
        f"with kv_cache_dtype=int8 {cache_bytes // diagnosis['model']['kv_bytes_per_token_in_8_bits']:,} tokens"
    )
    if cache_bytes >= longest_bytes:
        return Check("KV cache", Status.OK, finding)
    remedy = "raise gpu_memory_utilization" if diagnosis["is_gpu"] else "raise kv_cache_bytes"
    return Check("KV cache", Status.WARN, finding, f"no request of full length fits: {remedy} or lower max_model_len")


def _diagnose(directory: Path | None, num_ranks: int) -> Diagnosis | Check:
    """Return the diagnosis that the process prints, or a failed check."""
    models = [
        HeadwayConfig(model=DEMO_MODEL_NAME).model_path,
        *(() if directory is None else (str(directory), str(num_ranks))),
    ]
    try:
        line = run_module("the check of the kernels", _MODULE, *models, cpu_limit_s=_CPU_LIMIT_S, has_gpu=True)
    except ModelLoadError as error:
        advice = f"run it alone to see more: python -m {_MODULE} {' '.join(models)}"
        return Check("kernels", Status.FAIL, str(error), advice)
    diagnosis: Diagnosis = json.loads(line)
    return diagnosis


def _kernel_check(name: str, fault: str | None) -> Check:
    if fault is None:
        return Check(name, Status.OK, "agree with plain torch")
    return Check(name, Status.WARN, fault, "plain torch takes their place, which is right but slow")
