"""Replica of one model on one device: the plain object that a Serve deployment wraps."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.batch import ModelRunner, Pooler, PoolerFactory
from replicas.engine.config import EngineConfig, EngineLimits, sequence_blocks
from replicas.engine.constraint import ConstraintCompiler
from replicas.engine.engine import Engine
from replicas.engine.engine_thread import EngineThread
from replicas.engine.outbox import Coalescing, FlushPolicy
from replicas.engine.output_processor import DecoderFactory
from replicas.engine.step_watch import StepWatch
from replicas.model.build import describe_lowered
from replicas.model.hardware.limits import cpu_limit
from replicas.model.loading.tokenizer import make_decoder
from replicas.model.pooling.heads import PoolHead
from replicas.model.ranks.parts import lead_ranks, load_part
from replicas.model.ranks.processes import RankOptions
from replicas.options import ReplicaOptions
from replicas.protocol import Auto, GenerateRequest, ModelCard, PoolCard, ReplicaIdentity
from replicas.text.grammar import GrammarCompiler

_log = logging.getLogger(__name__)

_WEIGHT_FILES = ("*.safetensors", "*.bin")
_SAMPLE_BYTES = 65536
_FIRST_STEP_S = 30.0
"""Least limit of the first steps with a GPU, seconds. Some kernels are compiled when a step first needs them."""
_THREAD_END_S = 30.0
"""Longest wait for the end of the thread that has loaded a model, seconds. It has nothing left to do."""
_TPOT_S = 0.06
"""Target of `auto` with a GPU, seconds: streams that are faster than people read. A CPU may never be as fast."""
_STREAM_CHUNKS_PER_S = 2000.0
_STREAM_CHUNKS_PER_S_ON_CPU = 25.0
"""Chunks per second and processor, for an engine that computes on the processors that carry the chunks."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend of an engine: a runner that computes steps, and the facts from which the engine's limits follow."""

    runner: ModelRunner
    decoders: DecoderFactory
    num_blocks: int
    max_model_len: int
    vocab_size: int
    """Tokens that the model has rows for, with ids from 0."""
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    kernels: str = ""
    """Kernels that compute attention; empty: not known."""
    weights: str = ""
    """Format of the weights in the checkpoint and in memory; empty: not known."""
    cache_dtype: str = ""
    """Number format of the KV cache; empty: not known."""
    constraints: ConstraintCompiler | None = None
    """Compiler of grammars; None: outputs cannot have one."""
    counts_tokens: bool = False
    """True if penalties need no token on the host."""
    notes: tuple[str, ...] = ()
    """Faults of the checkpoint with which the model can be served all the same, and lowered limits, a sentence each."""
    windows: tuple[int | None, ...] = (None,)
    """Window of each block table of a sequence, tokens; None: its layers see all tokens."""
    num_state_slots: int = 0
    """Slots for recurrent state; 0: the model has none."""
    limits: EngineLimits | None = None
    """Limits that the KV cache holds; None: those of the options."""
    poolers: PoolerFactory | None = None
    """Makers of pooled outputs; None: the model has no pooling."""
    pool: PoolCard | None = None
    """Description of the pooled outputs."""
    generates: bool = True
    """True if the model generates tokens."""
    whole_prompts: bool = False
    """True if a prompt must be computed in one step."""
    warm_step_s: float = 0.0
    """Seconds that a few of the largest steps take once kernels are compiled."""


def load_torch_backend(options: ReplicaOptions) -> Backend:
    """Load and warm up the model that `options` name.

    Raises:
        ModelLoadError: files or options cannot be used, or the KV cache does not fit.
        UnsupportedModel: the model's architecture cannot be served.
    """
    of_ranks = RankOptions(options.model, options.runner, options.limits)
    part = load_part(of_ranks) if options.model.tensor_parallel_size == 1 else lead_ranks(of_ranks)
    loaded, runner, limits = part.loaded, part.runner, part.limits
    lowered = describe_lowered(options.limits, limits, runner.num_blocks, len(runner.windows))
    return Backend(
        runner=part.launcher,
        decoders=lambda request: make_decoder(loaded.tokenizer, request.prompt_token_ids, request.params),
        num_blocks=runner.num_blocks,
        windows=runner.windows,
        num_state_slots=runner.num_state_slots,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        kernels=runner.kernels,
        weights=loaded.weights,
        cache_dtype=runner.cache_dtype,
        constraints=None
        if loaded.tokenizer is None
        else GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids),
        counts_tokens=runner.counts_tokens,
        notes=(*loaded.notes, *filter(None, [lowered])),
        limits=limits,
        warm_step_s=part.warm_step_s,
        poolers=None if loaded.head is None else partial(_pooler_of, loaded.head),
        pool=None if loaded.head is None else loaded.head.card,
        generates=loaded.generates,
        whole_prompts=loaded.is_two_sided,
    )


def _pooler_of(head: PoolHead, request: GenerateRequest) -> Pooler:
    assert request.params.pool is not None
    return head.pooler(request.params.pool, len(request.prompt_token_ids))


LoadBackend = Callable[[ReplicaOptions], Backend]
"""Loader of an engine's backend, called in the replica's process."""


class ModelReplica:
    """Loaded model and its engine, independent of Ray and HTTP.

    It may be made in any thread; loading blocks that thread. Its engine is started and used on one event loop.
    """

    def __init__(
        self, options: ReplicaOptions, replica_id: str, node_id: str, load_backend: LoadBackend = load_torch_backend
    ) -> None:
        started_s = time.monotonic()
        backend, self._thread = _loaded_in_thread(lambda: load_backend(options))
        config = _engine_config(options, backend)
        self.card = ModelCard(
            model_id=options.model.path,
            max_model_len=config.max_model_len,
            vocab_size=backend.vocab_size,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_longest=config.num_blocks / config.sequence_blocks.num_blocks(config.max_model_len),
            max_num_seqs=config.num_slots,
            dtype=backend.dtype,
            device=backend.device,
            kernels=backend.kernels,
            weights=backend.weights,
            cache_dtype=backend.cache_dtype,
            notes=backend.notes,
            pool=backend.pool,
            generates=backend.generates,
        )
        for note in backend.notes:
            _log.warning("note about the model: %s", note)
        is_on_cpu = backend.device == "cpu"
        default_chunks_per_s = _STREAM_CHUNKS_PER_S_ON_CPU * cpu_limit().num_cpus if is_on_cpu else _STREAM_CHUNKS_PER_S
        self._coalescing = Coalescing(
            FlushPolicy(options.streams.coalesce_interval_s, options.streams.coalesce_tokens),
            options.streams.max_stream_chunks_per_s or default_chunks_per_s,
            align_when_throttled=is_on_cpu,
        )
        self._constraints = backend.constraints
        self._poolers = backend.poolers
        first_step_s = 0.0 if is_on_cpu else _FIRST_STEP_S
        self._steps = StepWatch(options.limits.max_step_s, backend.warm_step_s, first_step_s)
        precision = f"{backend.dtype} {options.model.quantization} {backend.weights} {backend.cache_dtype}"
        if options.model.tensor_parallel_size > 1:  # Sums over ranks are rounded in another way.
            precision += f" {options.model.tensor_parallel_size} ranks"
        weights_id = weights_digest(options.model.path, precision)
        identity = ReplicaIdentity(replica_id, node_id, os.getpid(), weights_id)
        self._engine = Engine(config, backend.runner, backend.decoders, identity)
        _log.info("loaded in %.1f s: %s", time.monotonic() - started_s, self.card)

    def start(self) -> AsyncEngine:
        """Start the engine on the running event loop, and return it. Called once."""
        engine = AsyncEngine(
            self._engine,
            self._coalescing,
            constraints=self._constraints,
            steps=self._steps,
            thread=self._thread,
            poolers=self._poolers,
        )
        engine.start()
        return engine


def _loaded_in_thread(load: Callable[[], Backend]) -> tuple[Backend, EngineThread]:
    """Load a backend in a thread, and return it with the thread that must run its steps."""
    thread = EngineThread()
    try:
        backend = thread.call(load)
    except BaseException:
        thread.end()
        raise
    if backend.device != "cpu":
        return backend, thread
    # OpenMP keeps a pool of threads per calling thread. While the pool of the loading thread exists, OpenMP puts the
    # engine's threads to sleep after each operation.
    thread.end()
    thread.join(_THREAD_END_S)
    return backend, EngineThread()


def weights_digest(path: str, precision: str) -> str:
    """Return a digest of a checkpoint's weights and their precision: equal ones give the same tokens.

    It reads three samples of each file of weights, which differ between any two trained models, and not all of it. The
    digest of what is not a directory, such as a hub id, is that of its name.
    """
    digest = hashlib.blake2b(precision.encode(), digest_size=16)
    files = sorted(file for pattern in _WEIGHT_FILES for file in Path(path).glob(pattern))
    if not files:
        digest.update(path.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for position in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                opened.seek(position)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _engine_config(options: ReplicaOptions, backend: Backend) -> EngineConfig:
    """Return the engine's complete limits. If no `max_model_len` was chosen, a small KV cache lowers the model's."""
    engine_limits = backend.limits or options.limits
    limits = asdict(engine_limits)
    if options.limits.async_scheduling is None:
        limits["async_scheduling"] = backend.device.startswith("cuda")
    max_model_len = backend.max_model_len
    if backend.whole_prompts:
        max_model_len = min(max_model_len, engine_limits.max_num_batched_tokens)
        limits["enable_prefix_caching"] = False
    if options.model.max_model_len is None:
        blocks = sequence_blocks(engine_limits, backend.windows, is_asynchronous=limits["async_scheduling"])
        max_model_len = min(max_model_len, blocks.num_tokens(backend.num_blocks))
    auto_s = 0.0 if backend.device == "cpu" else _TPOT_S
    limits["tpot_targets_s"] = tuple(
        auto_s if target_s is Auto.AUTO else target_s for target_s in options.limits.tpot_targets_s
    )
    return EngineConfig(
        **limits,
        num_blocks=backend.num_blocks,
        windows=backend.windows,
        num_state_slots=backend.num_state_slots,
        max_model_len=max_model_len,
        counts_on_device=backend.counts_tokens,
        cache_dtype=backend.cache_dtype,
        vocab_size=backend.vocab_size,
        whole_prompts=backend.whole_prompts,
        eos_token_ids=backend.eos_token_ids,
    )
