"""One model served from one device: the plain object that a Serve deployment wraps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from replicas.engine.async_engine import AsyncEngine, Coalescing, Rhythm
from replicas.engine.config import EngineConfig, KVPressurePolicy
from replicas.engine.engine import Engine
from replicas.engine.generation import DecoderFactory
from replicas.engine.interfaces import ModelRunner
from replicas.model.build import RunnerOptions, build_runner, warm_up
from replicas.model.kernel_build import DEFAULT_KERNEL_DIRECTORY
from replicas.model.loader import ModelOptions, load_model
from replicas.model.tokenizer import make_decoder
from replicas.protocol import ModelCard, ReplicaIdentity

_log = logging.getLogger(__name__)

_DELTAS_PER_S = 2000.0
_DELTAS_PER_S_ON_CPU = 25.0
"""A processor, where the engine computes on those that carry them."""


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
    target_itl_ms: float | None = None
    max_num_partial_prefills: int = 2
    enable_prefix_caching: bool = True
    kv_pressure_policy: KVPressurePolicy = KVPressurePolicy.PREEMPT
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    promote_after_s: float = 30.0
    kv_cache_bytes: int = 512 * 2**20
    """Size of the KV cache on CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV cache may take on CUDA."""
    attention_backend: str = "auto"
    """auto, flash, triton or gather; on CUDA auto is the first of these that proves right."""
    num_threads: int | None = None
    """torch threads on CPU; None: torch's own choice."""
    enforce_eager: bool = False
    """Launch every operation of a decode by itself, on CUDA, rather than replay captured graphs."""
    async_scheduling: bool | None = None
    """Launch a step before the results of the one before are known; None: on CUDA."""
    kernel_directory: str | None = DEFAULT_KERNEL_DIRECTORY
    """Where kernels that are compiled on this machine, for CPU, are kept; None: none are compiled."""
    compile_layers: bool = False
    """Have torch.compile fuse layers that have no fused form of ours, on CUDA."""
    quantization: str = "none"
    """none or int8: weights of linear layers in 8 bits, on CPU with compiled kernels only."""
    coalesce_interval_s: float = 0.03
    """A stream's deltas after its first are sent at most this often, seconds ..."""
    coalesce_tokens: int = 8
    """... or when this many tokens wait."""
    max_deltas_per_s: float | None = None
    """Deltas of all streams together: with more streams each sends less often. None: as many as Serve carries, or,
    where the engine computes on the processors that carry them, few."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What an engine runs on: a device that computes steps, and the facts it derives its limits from."""

    runner: ModelRunner
    decoders: DecoderFactory
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str


def load_torch_backend(options: ReplicaOptions) -> Backend:
    """The model that `options` name, loaded and warmed up.

    Raises:
        ModelLoadError: files or options cannot be used, or the KV cache does not fit.
        UnsupportedModel: its architecture cannot be served.
    """
    loaded = load_model(
        ModelOptions(
            model=options.model,
            dtype=options.dtype,
            device=options.device,
            max_model_len=options.max_model_len,
            num_threads=options.num_threads,
            kernel_directory=options.kernel_directory,
            compile_layers=options.compile_layers,
            quantization=options.quantization,
        )
    )
    runner_options = RunnerOptions(
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
    )
    runner = build_runner(loaded, runner_options)
    warm_up(runner, runner_options)
    return Backend(
        runner=runner,
        decoders=lambda request: make_decoder(loaded.tokenizer, request.prompt_token_ids),
        num_blocks=runner.num_blocks,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
    )


LoadBackend = Callable[[ReplicaOptions], Backend]


class ModelReplica:
    """A loaded model and its engine; knows nothing of Ray or HTTP.

    Made in any thread (loading blocks); its engine is started and used on one event loop.
    """

    def __init__(
        self, options: ReplicaOptions, replica_id: str, node_id: str, load_backend: LoadBackend = load_torch_backend
    ) -> None:
        started_s = time.monotonic()
        # In a thread that ends: while threads that computed for it were left, OpenMP would have those of the engine
        # sleep after each operation.
        with ThreadPoolExecutor(1, "loading") as loading:
            backend = loading.submit(load_backend, options).result()
        config = _engine_config(options, backend)
        self.card = ModelCard(
            model_id=options.model,
            max_model_len=config.max_model_len,
            vocab_size=backend.vocab_size,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            dtype=backend.dtype,
            device=backend.device,
        )
        is_on_cpu = backend.device == "cpu"
        default_deltas_per_s = _DELTAS_PER_S_ON_CPU * (os.cpu_count() or 1) if is_on_cpu else _DELTAS_PER_S
        self._coalescing = Coalescing(
            Rhythm(options.coalesce_interval_s, options.coalesce_tokens),
            options.max_deltas_per_s or default_deltas_per_s,
            slowed_are_common=is_on_cpu,
        )
        identity = ReplicaIdentity(replica_id, node_id, os.getpid())
        self._engine = Engine(config, backend.runner, backend.decoders, identity)
        _log.info("loaded in %.1f s: %s", time.monotonic() - started_s, self.card)

    def start(self) -> AsyncEngine:
        """Begin to serve on the running event loop; called once."""
        engine = AsyncEngine(self._engine, self._coalescing)
        engine.start()
        return engine


def _engine_config(options: ReplicaOptions, backend: Backend) -> EngineConfig:
    """The engine's limits. Where no `max_model_len` was asked for, a small KV cache may lower the model's."""
    max_model_len = backend.max_model_len
    if options.max_model_len is None:
        max_model_len = min(max_model_len, backend.num_blocks * options.block_size)
    async_scheduling = options.async_scheduling
    if async_scheduling is None:
        async_scheduling = backend.device.startswith("cuda")
    return EngineConfig(
        num_blocks=backend.num_blocks,
        max_model_len=max_model_len,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        target_itl_ms=options.target_itl_ms,
        max_num_partial_prefills=options.max_num_partial_prefills,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_pressure_policy=options.kv_pressure_policy,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        promote_after_s=options.promote_after_s,
        async_scheduling=async_scheduling,
        eos_token_ids=backend.eos_token_ids,
    )
