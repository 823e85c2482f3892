"""Memory of a replica on CPU, and of weights on a GPU, computed from a checkpoint's files. It imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replicas.engine.config import EngineLimits
from replicas.errors import ModelLoadError
from replicas.model.checkpoint.expert_weights import find_expert_weights
from replicas.model.checkpoint.formats import QuantizedWeight, Weights, has_offsets, has_panels, is_kept
from replicas.model.hardware.kernel_build import can_compile
from replicas.model.hardware.processor import value_bytes_on_cpu
from replicas.model.loading.checks import read_weights
from replicas.model.loading.options import ROUNDS_AGAIN, ModelOptions, RunnerOptions
from replicas.model.pooling.kinds import has_output_layer, is_two_sided

_GIB = 2**30
_PROCESS_BYTES = 300 * 2**20
"""Least memory of a process with torch and transformers, but without a model, for a first check without torch."""
_WORKER_BYTES = 96 * 2**20
"""Memory of Ray in a replica's process, of its threads, and of what loading has freed in pieces."""
_BYTES_PER_LOGIT = 16
_JOINED = re.compile(r"\.(?:[qkv]|gate|up)_proj\.")
"""Parts of names by which weights differ that are joined to one layer."""
_DENSE = re.compile(r"\.experts\.|\.kv_b_proj\.")
"""Parts of names of weights that become dense on a CPU: those of experts and of latent attention's heads."""
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "embeddings.weight", "wte.weight", "wpe.weight")
_LEAST_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes that a replica on CPU takes."""

    weights: int
    kv_cache: int
    activations: int
    process: int = _PROCESS_BYTES
    num_ranks: int = 1
    """Processes of the replica, which all have activations."""

    def with_process(self, measured: int) -> ReplicaMemory:
        """Return this memory with that of a process of which torch, transformers and the tokenizer were measured."""
        return replace(self, process=measured + _WORKER_BYTES)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.kv_cache + self.num_ranks * (self.activations + self.process)

    def __str__(self) -> str:
        return (
            f"{_gib(self.weights)} of weights, {_gib(self.kv_cache) if self.kv_cache else 'none'} of KV cache, "
            f"{_gib(self.activations)} of activations and {_gib(self.process)} of process{self._by_rank}"
        )

    @property
    def _by_rank(self) -> str:
        return f" for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """Weights of a checkpoint, or a rank's part of them, on a GPU."""

    num_values: int
    num_bytes: int
    num_bytes_in_fp8: int
    """Bytes with `quantization=fp8`."""
    description: str
    """Formats of the weights and what becomes of them, for people."""


def replica_memory(directory: Path, model: ModelOptions, runner: RunnerOptions, limits: EngineLimits) -> ReplicaMemory:
    """Return the memory that one replica of a checkpoint takes on this machine's CPU.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    defaults = {"model_type": "", "architectures": None, "tie_word_embeddings": True}
    config = defaults | json.loads((directory / "config.json").read_text())
    of_whole = {name: config[name] for name in ("architectures", "tie_word_embeddings")}
    config |= (config.get("text_config") or {}) | of_whole
    value_bytes = value_bytes_on_cpu(model.dtype)
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    inner = _largest(config.get("intermediate_size")) or 4 * hidden
    # The residual, its update, their norm and the attention's heads; then gate, up and their product.
    row_bytes = (4 * hidden + 3 * inner) * value_bytes
    logit_bytes = limits.max_num_seqs * config.get("vocab_size", 0) * (_BYTES_PER_LOGIT + value_bytes)
    has_cache = not is_two_sided(SimpleNamespace(**config))
    return ReplicaMemory(
        _weight_bytes(read_weights(directory), model, config, value_bytes),
        runner.kv_cache_bytes if has_cache else 0,
        limits.max_num_batched_tokens * row_bytes + logit_bytes,
        num_ranks=model.tensor_parallel_size,
    )


def _largest(size: int | list[int] | None) -> int:
    """Return a size that some configs give for each layer."""
    return max(size, default=0) if isinstance(size, list) else size or 0


def check_memory(needed: ReplicaMemory, directory: Path, available_bytes: int, num_replicas: int = 1) -> None:
    """Check that `num_replicas` replicas fit into the memory.

    Raises:
        ModelLoadError: they do not; the message says what each needs, and the nearest setting that fits.
    """
    if needed.total * num_replicas <= available_bytes:
        return
    per_replica = "" if num_replicas == 1 else f" for each of {num_replicas} replicas"
    raise ModelLoadError(
        f"{directory} needs {_gib(needed.total)}{per_replica} ({needed}); {_gib(available_bytes)} of memory are free; "
        f"{_remedy(needed, available_bytes, num_replicas)}"
    )


def _remedy(needed: ReplicaMemory, available_bytes: int, num_replicas: int) -> str:
    """Return the nearest setting with which the replicas fit, or else the advice to take another model."""
    cache_bytes = available_bytes // num_replicas - (needed.total - needed.kv_cache)
    if cache_bytes >= _LEAST_CACHE_BYTES:
        return f"it fits with kv_cache_bytes={cache_bytes >> 20}MiB"
    if num_replicas > 1 and needed.total <= available_bytes:
        return f"it fits with num_replicas={available_bytes // needed.total}"
    return "choose a smaller model, or a checkpoint in 4 bits"


def _weight_bytes(weights: Weights, model: ModelOptions, config: Mapping[str, Any], value_bytes: int) -> int:
    """Return the bytes of all weights. An output layer that shares the embedding's weight has a packed copy of it."""
    keeps_bits = can_compile(model.kernel_cache_dir, model.dtype) and model.quantization not in ROUNDS_AGAIN
    packed_weights = [
        weight
        for weight in weights.quantized.values()
        if keeps_bits and is_kept(weight) and not _DENSE.search(weight.name)
    ]
    dense = weights.num_values - sum(weight.layout.num_outputs * weight.layout.num_inputs for weight in packed_weights)
    is_copied = config["tie_word_embeddings"] and has_output_layer(SimpleNamespace(**config))
    if is_copied and not {"lm_head.weight"} & (weights.plain.keys() | weights.quantized.keys()):
        dense += config.get("vocab_size", 0) * (config.get("hidden_size") or 0)
    layers: dict[str, list[QuantizedWeight]] = defaultdict(list)
    for weight in packed_weights:
        layers[_JOINED.sub(".", weight.name)].append(weight)
    return dense * value_bytes + sum(_kept_bytes(parts, weights) for parts in layers.values())


def _kept_bytes(parts: Sequence[QuantizedWeight], weights: Weights) -> int:
    """Return the bytes of one layer, as `GroupedLinear.join` makes it: with the most bits and the smallest groups."""
    layouts = [part.layout for part in parts]
    formats = {(part.format.numbers, part.layout.bits) for part in parts}
    bits = 8 if len(formats) > 1 else layouts[0].bits
    num_inputs, group = layouts[0].num_inputs, math.gcd(*(layout.inputs_per_scale for layout in layouts))
    scale_bytes = 8 if any(has_offsets(part, weights) for part in parts) else 4
    return sum(layout.num_outputs for layout in layouts) * (num_inputs * bits // 8 + num_inputs // group * scale_bytes)


def weights_on_gpu(directory: Path, dtype: str, value_bytes: int, *, keeps_bits: bool) -> GpuWeights:
    """Return the memory that the weights of a checkpoint take on a GPU, with `value_bytes` for each value in `dtype`.

    With `keeps_bits` the kernels for weights of 4 and 8 bits work there.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    return gpu_weights(read_weights(directory), dtype, value_bytes, keeps_bits=keeps_bits)


def gpu_weights(weights: Weights, dtype: str, value_bytes: int, *, keeps_bits: bool) -> GpuWeights:
    """Return the memory that weights, or the parts of them that a rank holds, take on a GPU. See `weights_on_gpu`."""
    names = {name for experts in find_expert_weights(weights).values() for name in experts.names()}
    kept = {
        name: weight
        for name, weight in weights.quantized.items()
        if keeps_bits and has_panels(weight) and (name in names or not _DENSE.search(name))
    }
    dense = weights.num_values - sum(weight.layout.num_outputs * weight.layout.num_inputs for weight in kept.values())
    num_bytes = dense * value_bytes + sum(_panel_bytes(weight, weights) for weight in kept.values())
    shapes = [weight.layout.shape for name, weight in weights.quantized.items() if name not in kept]
    num_bytes_in_fp8 = num_bytes - _saved_by_fp8(weights, shapes, value_bytes)
    return GpuWeights(weights.num_values, num_bytes, num_bytes_in_fp8, weights.description(dtype, kept))


def _saved_by_fp8(weights: Weights, dequantized: Sequence[Sequence[int]], value_bytes: int) -> int:
    """Return the bytes that rounding to fp8 saves. An output layer that shares the embedding's weight has a copy."""
    plain = {name: weights.shape_of(name) for name, tensor in weights.plain.items() if len(tensor.shape) in (2, 3)}
    embeddings = [shape for name, shape in plain.items() if name.endswith(_EMBEDDINGS)]
    linears = [shape for name, shape in plain.items() if not name.endswith(_EMBEDDINGS)]
    saved = sum(math.prod(shape) * value_bytes - _fp8_bytes(shape) for shape in (*linears, *dequantized))
    has_output_layer = any(name.endswith("lm_head.weight") for name in (*weights.plain, *weights.quantized))
    return saved - (0 if has_output_layer else sum(map(_fp8_bytes, embeddings)))


def _fp8_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a linear layer's weight, or those of experts, in 8 bits with a scale for each output."""
    return math.prod(shape) + 4 * math.prod(shape[:-1])


def _panel_bytes(weight: QuantizedWeight, weights: Weights) -> int:
    """Return the bytes of a weight in panels, apart from what fills the last ones."""
    layout = weight.layout
    scales = next(tensor for name, tensor in weight.parts.items() if "scale" in name or name == ".SCB")
    scale_bytes = 2 if scales.dtype in ("F16", "BF16", "U8") else 4
    if has_offsets(weight, weights):
        scale_bytes += 4 if ".weight_minimum" in weight.parts else 1
    num_scales = layout.num_outputs * -(-layout.num_inputs // layout.inputs_per_scale)
    return layout.num_outputs * layout.num_inputs * layout.bits // 8 + num_scales * scale_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
