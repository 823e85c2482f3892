"""Options for loading and running a model. The module imports no torch, so every process can import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replicas.settings import check_bounds, setting

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int4", "int8", "fp8", "fp8_w8a8"]
ROUNDS_AGAIN: tuple[Quantization, ...] = ("int8", "fp8_w8a8")
"""Quantizations that also round weights which a checkpoint has in 4 or 8 bits."""
KVCacheDtype = Literal["auto", "fp8", "int8"]

DEFAULT_KERNEL_CACHE_DIR = "~/.cache/headway"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Model, number format and device of a replica."""

    path: str
    """Directory or hub id. Only safetensors weights are read, and no code that comes with them is run."""
    dtype: Dtype = setting("auto")
    """Number format of weights and activations; auto: bfloat16 where the hardware has it natively, else float32."""
    device: Device = setting("auto")
    """Device that runs the model; auto: the GPU that the replica was given, else the CPU."""
    max_model_len: int | None = setting(None, ge=1)
    """Most tokens (prompt + output) of one sequence; None: as many as the model and the KV cache allow."""
    num_threads: int | None = setting(None, ge=1)
    """torch threads of a model replica on CPU; None: one for each CPU that is reserved for the replica."""
    kernel_cache_dir: str | None = setting(DEFAULT_KERNEL_CACHE_DIR)
    """Directory for the kernels that the first start on a machine without a GPU compiles.
    Compilation takes about a minute, once for each version of torch. None: replicas use plain torch and are
    slower."""
    compile_layers: bool = setting(False)
    """On a GPU, have torch.compile fuse the layers of models for which Headway has no fused layers. Start-up takes
    longer."""
    batch_invariant: bool = setting(False)
    """Give a sequence the same tokens whatever shares its steps, on a GPU too: with kernels whose sums have one order
    for any number of rows. They are slower. A model with an operation that has no such kernel does not start. On a CPU
    no sequence's tokens depend on others anyway, and the setting only refuses a model in 16 bits that the compiled
    kernels do not support as a whole."""
    quantization: Quantization = setting("none")
    """Rounding of the weights of linear layers as they are loaded: int8 and fp8 (e4m3) with one scale for each output,
    int4 with one for every 32 inputs. On a GPU experts are rounded, too. All save memory and time, cost some quality,
    and need the compiled kernels, on a GPU Triton's. fp8_w8a8 also rounds inputs, on GPUs of compute capability 8.9 and
    above. On a CPU fp8 and fp8_w8a8 have the same values and save nothing. none: weights stay as the checkpoint has
    them."""

    tensor_parallel_size: int = setting(1, ge=1, le=8)
    """GPUs of one node that compute each step of a replica together. On a CPU: as many processes, for tests."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """KV cache and attention of a replica."""

    kv_cache_bytes: int = setting(512 * 2**20, gt=0)
    """Size of a replica's KV cache on CPU, bytes."""
    kv_cache_dtype: KVCacheDtype = setting("auto")
    """Number format of keys and values in the KV cache. auto: that of the model; fp8 (e4m3) and int8: 8 bits, with a
    scale in float32 for each token and KV head, so that about twice as many tokens fit. int8 costs less quality."""
    gpu_memory_utilization: float = setting(0.9, gt=0, le=1)
    """Share of a GPU's memory for all replicas on it together: weights, activations, CUDA graphs and KV cache. A
    replica that was given a part of the GPU takes that part of it."""
    attention_backend: Literal["auto", "flash", "triton", "gather"] = setting("auto")
    """Implementation of attention. flash: FlashAttention 3, if it is installed; triton: Headway's GPU kernels; gather:
    plain torch; auto: the first of these that passes the check at start-up. A replica whose backend was chosen
    explicitly and fails the check does not start."""
    enforce_eager: bool = setting(False)
    """On a GPU, launch the operations of each step one by one instead of replaying captured CUDA graphs, which all
    decodes have and steps with prompts of up to 512 tokens."""
    num_gpus: float = 1.0
    """GPUs that the replica was given; less than one: a part of one."""

    def __post_init__(self) -> None:
        check_bounds(self)
