"""One model served from one device: the plain object that a Serve deployment wraps."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.engine.config import KVPressurePolicy


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What an operator chooses for a replica; defaults work on a laptop. None means: derived from the model."""

    model: str
    """Directory or hub id."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16; auto is bfloat16 where the hardware has it, else float32."""
    device: str = "auto"
    """auto, cpu or cuda."""
    max_model_len: int | None = None
    """Most tokens of one sequence; None: what the model's config says, or the KV cache if that is smaller."""
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_num_partial_prefills: int = 2
    enable_prefix_caching: bool = True
    kv_pressure_policy: KVPressurePolicy = KVPressurePolicy.PREEMPT
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_starvation_s: float = 30.0
    kv_cache_bytes: int = 512 * 2**20
    """Size of the KV cache on CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV cache may take on CUDA."""
    num_threads: int | None = None
    """torch threads on CPU; None: torch's own choice."""
    coalesce_interval_s: float = 0.03
    """A stream's deltas after its first are sent at most this often, seconds ..."""
    coalesce_tokens: int = 8
    """... or when this many tokens wait."""
