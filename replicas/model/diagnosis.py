"""Diagnosis of a machine: `python -m replicas.model.diagnosis CHECKPOINT [MODEL RANKS]` prints what its kernels do.

CHECKPOINT is a small model, with which the kernels are compared with plain torch. MODEL is a directory whose memory is
computed from its config, for each of RANKS ranks. The process loads what may crash it, so `headway doctor` runs it
apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from replicas.engine.config import GPU_BATCHED_TOKENS, EngineLimits, sequence_blocks
from replicas.errors import ModelLoadError
from replicas.model.attention.cpp import CppAttention, can_attend
from replicas.model.attention.interface import AttentionPort
from replicas.model.attention.kv_cache import AttentionLayer, bytes_per_block
from replicas.model.attention.layer_groups import bytes_of_block, group_layers
from replicas.model.attention.probe import dry_forward, probe_shapes
from replicas.model.attention.select import check_attention, choose_attention
from replicas.model.attention.state_cache import bytes_per_slot
from replicas.model.checkpoint.weight_parts import cut_weights
from replicas.model.hardware.device import choose_device, choose_dtype
from replicas.model.hardware.kernel_build import KernelBuildError, built_library
from replicas.model.hardware.selfcheck import WHOLE_MODEL, find_fault, relative_error
from replicas.model.layers.latent_attention import store_latents
from replicas.model.loading.checks import read_weights
from replicas.model.loading.config import read_config
from replicas.model.loading.facts import choose_max_model_len
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.loader import load_model, longest_of
from replicas.model.loading.memory import GpuWeights, gpu_weights
from replicas.model.loading.options import ModelOptions
from replicas.model.loading.weights import model_without_values
from replicas.model.parallel.shares import ModelCuts, Share
from replicas.model.pooling.kinds import is_two_sided

_BLOCK_SIZE = 16
_KEPT_BITS = "weights of 4 and 8 bits in Triton"
_READ_BYTES, _NUM_READS = 2**29, 8
_TOKEN_IDS = [3, 4, 5, 6, 7]


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Result of one comparison of kernels with plain torch."""

    name: str
    fault: str | None
    """Reason why they are not used; None: they work."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory that a model, or the part of one rank, takes for its weights, a token and the longest sequence."""

    kv_bytes_per_token: int
    """0: the model computes whole texts, without a KV cache."""
    kv_bytes_per_token_in_8_bits: int
    max_model_len: int
    has_experts: bool
    """True if a token reads a part of the weights alone."""
    state_slot_bytes: int
    """Size of a slot for recurrent state; 0: the model has none."""
    kv_bytes_of_longest: int
    """KV cache of a sequence of `max_model_len` tokens."""
    num_values: int
    """Number of weights."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Device that a replica on this machine would use, the kernels for it, and a model's memory."""

    device: str
    """cpu, or the name of the GPU."""
    is_gpu: bool
    num_gpus: int
    gpu_memory_bytes: int
    """Memory of one GPU."""
    dtype: str
    value_bytes: int
    """Size of a weight and of a number in the KV cache."""
    read_bytes_per_s: float
    """Bandwidth of reads from the device's memory, bytes/s."""
    kernels: list[KernelCheck]
    keeps_bits: bool
    """True if a GPU computes with weights of 4 and 8 bits."""
    model: ModelMemory | None
    part: GpuWeights | None
    """Weights that each of several ranks holds; None: there is one."""
    model_fault: str | None
    """Reason why the model cannot be served."""


def diagnose(checkpoint: str, model: str | None, num_ranks: int = 1) -> Diagnosis:
    """Return the diagnosis of this machine, with `model` on `num_ranks` ranks.

    Compiles the CPU kernels if no replica has yet.

    Raises:
        ModelLoadError: `checkpoint` cannot be served.
    """
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    is_gpu = device.type == "cuda"
    kernels = list(_gpu_checks(checkpoint) if is_gpu else _cpu_checks(checkpoint))
    keeps_bits = any(check.name == _KEPT_BITS and check.fault is None for check in kernels)
    memory, part, fault = None, None, None
    if model is not None:
        try:
            memory = memory_of(read_config(model), dtype, num_ranks, is_gpu=is_gpu)
            part = part_of(model, dtype, num_ranks, keeps_bits=keeps_bits) if num_ranks > 1 else None
        except ModelLoadError as error:
            fault = str(error)
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    return Diagnosis(
        device="cpu" if properties is None else properties.name,
        is_gpu=is_gpu,
        num_gpus=torch.cuda.device_count() if is_gpu else 0,
        gpu_memory_bytes=0 if properties is None else properties.total_memory,
        dtype=_name_of(dtype),
        value_bytes=dtype.itemsize,
        read_bytes_per_s=_read_bytes_per_s(device),
        kernels=kernels,
        keeps_bits=keeps_bits,
        model=memory,
        part=part,
        model_fault=fault,
    )


def part_of(model: str, dtype: torch.dtype, num_ranks: int, *, keeps_bits: bool) -> GpuWeights:
    """Return the weights that one of `num_ranks` ranks holds of the model in the directory `model`.

    Raises:
        ModelLoadError: files are damaged, or a layer cannot be cut.
    """
    cuts = ModelCuts(read_config(model), Share(0, num_ranks))
    weights = cut_weights(read_weights(Path(model)), cuts.cut, num_ranks)
    return gpu_weights(weights, _name_of(dtype), dtype.itemsize, keeps_bits=keeps_bits)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_bytes_per_s(device: torch.device) -> float:
    """Return the fastest of several sums of a tensor that no cache holds, bytes/s."""
    values = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(_NUM_READS):
        start_s = time.perf_counter()
        values.sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start_s)
    return _READ_BYTES / min(seconds)


def _cpu_checks(checkpoint: str) -> Iterator[KernelCheck]:
    options = ModelOptions(checkpoint, device="cpu")
    assert options.kernel_cache_dir is not None
    try:
        built_library(options.kernel_cache_dir)
    except KernelBuildError as error:
        yield KernelCheck("compiled CPU kernels", str(error))
        return
    loaded = load_model(options)
    if not loaded.has_kernels:
        yield KernelCheck("compiled CPU kernels", f"they cannot be loaded, or do not support {loaded.dtype}")
        return
    yield KernelCheck("layers in C++", find_fault(_model_errors(loaded, options), loaded.dtype, WHOLE_MODEL))
    spec = loaded.attention_spec(_BLOCK_SIZE)
    fault = check_attention(spec, [CppAttention]) if can_attend(spec.layers) else "the model's heads are not supported"
    yield KernelCheck("attention in C++", fault)


def _model_errors(loaded: LoadedModel, options: ModelOptions) -> Iterator[tuple[str, float]]:
    """Yield the error of the whole model with kernels against the model in plain torch."""
    plain = load_model(replace(options, kernel_cache_dir=None))
    logits, expected = (
        dry_forward(loaded_model.model, loaded_model.port, _TOKEN_IDS)[1] for loaded_model in (loaded, plain)
    )
    yield "the demo model", relative_error(logits, expected)


def _gpu_checks(checkpoint: str) -> Iterator[KernelCheck]:
    loaded = load_model(ModelOptions(checkpoint, device="cuda"))
    try:
        # Only torch for CUDA installs Triton.
        from replicas.model.layers.triton_ops import check_layer_ops
        from replicas.model.layers.triton_panels import check_panels
    except ImportError as error:
        yield KernelCheck("layers in Triton", str(error))
    else:
        yield KernelCheck("layers in Triton", check_layer_ops(loaded.dtype, loaded.device))
        yield KernelCheck(_KEPT_BITS, check_panels(loaded.dtype, loaded.device))
    for name, backend in (("attention in Triton", "triton"), ("FlashAttention 3", "flash")):
        try:
            choose_attention(loaded.attention_spec(_BLOCK_SIZE), backend)
        except ModelLoadError as error:
            yield KernelCheck(name, str(error.__cause__ or error))
        else:
            yield KernelCheck(name, None)


def memory_of(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int = 1, *, is_gpu: bool = False) -> ModelMemory:
    """Compute the memory of a model on each of its ranks from its config. On a GPU steps are scheduled ahead.

    Raises:
        ModelLoadError: the model cannot be cut for so many ranks.
    """
    if num_ranks > 1:
        config = ModelCuts(config, Share(0, num_ranks)).local_config()
    text = config.get_text_config(decoder=True)
    model = model_without_values(config).to(torch.bfloat16)  # torch has no grouped product of float32 there.
    store_latents(model)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    port = AttentionPort(model)
    if is_two_sided(config):
        probe_shapes(model, port, two_sided=True)
        return ModelMemory(0, 0, choose_max_model_len(longest_of(config), None), False, 0, 0, num_values)
    layers = probe_shapes(model, port) or _equal_layers(text)
    slot_bytes = bytes_per_slot(port.recurrent.layers, _BLOCK_SIZE, dtype)
    plain, quantized = (bytes_per_block(layers, 1, cache_dtype) for cache_dtype in (dtype, torch.int8))
    counts = (value for name, value in text.to_dict().items() if name.startswith("n") and name.endswith("experts"))
    has_experts = any(isinstance(count, int) and count > 1 for count in counts)
    longest = choose_max_model_len(longest_of(config), None)
    groups = group_layers(layers, longest, dtype)
    limits = EngineLimits(max_num_batched_tokens=GPU_BATCHED_TOKENS) if is_gpu else EngineLimits()
    blocks = sequence_blocks(limits, tuple(group.window for group in groups), is_asynchronous=is_gpu)
    longest_bytes = blocks.num_blocks(longest) * bytes_of_block(groups, blocks.block_size, dtype)
    return ModelMemory(plain, quantized, longest, has_experts, slot_bytes, longest_bytes, num_values)


def _equal_layers(config: PretrainedConfig) -> tuple[AttentionLayer, ...]:
    """Return the layers of a model whose code needs values, as if all had equal heads."""
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = AttentionLayer(0, num_kv_heads, num_kv_heads, head_size, head_size, None, None, False)
    num_layers: int = config.num_hidden_layers
    return (layer,) * num_layers


if __name__ == "__main__":
    try:
        result = (
            diagnose(sys.argv[1], sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else diagnose(sys.argv[1], None)
        )
    except ModelLoadError as error:
        sys.exit(str(error))
    print(json.dumps(asdict(result)))
