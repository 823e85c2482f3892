"""Runner of steps in CUDA graphs, captured at a few sizes: one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.attention.interface import AttentionContext
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.layer_groups import attention_by_group
from replicas.model.attention.plan import AttentionPlan, StatePlan
from replicas.model.attention.recurrent import StateContext
from replicas.model.attention.state_cache import StateCache
from replicas.model.batch.transfers import DeviceBuffer
from replicas.model.cuda_graphs.buffers import StepBuffers
from replicas.model.cuda_graphs.padding import PaddedPlan, StepPadding, StepShape
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.sampling.fixed_arrays import FixedSampling, SamplingPadding
from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.sampler import SampledTokens, SamplingPlan, SamplingShape, sample_greedy
from replicas.model.sampling.token_counts import TokenCounts

_log = logging.getLogger(__name__)

PlannedAttention = Callable[[KVCache, Tensor, AttentionPlan], AttentionContext]
"""Factory of the attention by a plan whose tensors outlive the pass, from cache, slots [num_tokens] int64 and plan."""
PlannedStates = Callable[[StateCache, StatePlan], StateContext]
"""The same for recurrent state."""
_MEBIBYTE = 2**20
_Outputs = TypeVar("_Outputs")


_MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Tokens of the captured steps that have prompts."""
_LARGEST_MIXED = {90: 2048, 100: 2048}
"""Tokens of the largest captured step with prompts, by compute capability. A larger step takes the device longer than
the host to launch. On an H200 that holds from 2,048 tokens on; no other GPU was measured, and a B200 is faster.

All replicas choose by this table, never by a measurement: the padding of a step may change bits, and equal weights must
give equal tokens everywhere.
"""
SMALL_MIXED = 512
"""The same for other GPUs, and where prompts have a kernel of their own that graphs do not use."""


def largest_mixed(capability: int) -> int:
    """Return the tokens of the largest step with prompts to capture on a GPU of a compute capability, such as 90."""
    return _LARGEST_MIXED.get(capability, SMALL_MIXED)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of decodes to capture: 1, 2, 4, 8, then 8 more each or, if that is more, about a quarter."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, size // 4 // 8 * 8)
    return (*sizes, max_num_seqs)


def step_shapes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_mixed: int = SMALL_MIXED,
    *,
    has_states: bool = False,
) -> tuple[StepShape, ...]:
    """Return the shapes to capture: those of decodes, then those of steps with prompts, each in order of size.

    `max_mixed` is the number of tokens of the largest step with prompts; `has_states` is true for recurrent layers.
    """
    decodes = partial(StepShape.decodes, has_states=has_states)
    mixed = partial(StepShape.mixed, max_num_seqs=max_num_seqs, has_states=has_states)
    largest = min(max_num_batched_tokens, max_mixed)
    sizes = [size for size in _MIXED_SIZES if size < largest]
    return (*map(decodes, bucket_sizes(max_num_seqs)), *(mixed(size) for size in (*sizes, largest) if size > 1))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a pass, one row for each item that samples. The next replay of any graph overwrites them."""

    logits: Tensor  # [num_rows, vocab_size] in the model's dtype, see `LoadedModel.logits`
    greedy: SampledTokens

    def first(self, num_rows: int) -> StepOutputs:
        """Return the outputs of the first `num_rows` rows."""
        return StepOutputs(self.logits[:num_rows], self.greedy.first(num_rows))


class GraphRunner:
    """Runner of small steps, which are padded to the next captured shape with tokens that have no sequence.

    A graph holds the whole forward pass and the greedy choice. A second one, by the number of rows, holds every other
    choice of tokens: masks are known later than the pass. A shape without a graph runs the same code eagerly.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        attention: PlannedAttention,
        shapes: Items[StepShape],
        counts: TokenCounts | None = None,
    ) -> None:
        """Make a runner of steps of `shapes`, in order of size: those of decodes, then the others.

        `counts` are the sampler's, for the graphs of other choices; None: there are none.
        """
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._states: PlannedStates | None = getattr(loaded.port.recurrent.backend, "planned", None)
        self.shapes = tuple(shapes)
        # A multiple of 4, so that each table begins at a multiple of 16 bytes.
        self._max_blocks = -(-loaded.max_model_len // cache.block_size // 4) * 4
        self._max_rows = max(shape.num_rows for shape in shapes)
        num_tables = len(cache.groups)
        self._buffers = StepBuffers(shapes, self._max_blocks, cache.block_size, loaded.device, num_tables)
        self._logits: Tensor | None = None
        self._counts = counts
        self._graphs: dict[StepShape, _Graph[StepOutputs]] = {}
        self._sampling_graphs: dict[SamplingShape, _Graph[SampledTokens]] = {}

    def padding(self) -> StepPadding:
        """Return a new planner of the steps."""
        factors = [group.layers_per_column for group in self._cache.groups]
        return StepPadding(self.shapes, self._max_blocks, factors)

    def sampling_padding(self) -> SamplingPadding | None:
        """Return a new planner of the sampling in graphs; None: there are no graphs for it."""
        return None if self._counts is None else SamplingPadding(self._row_sizes)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs) + len(self._sampling_graphs)

    def run(self, plan: PaddedPlan, on_device: DeviceBuffer, num_new_blocks: int) -> StepOutputs:
        """Run a planned pass; return one row for each item that samples.

        The last of the step's numbers are `num_new_blocks` cells of the block tables, and the block of each.
        """
        self._buffers.load(plan, on_device, num_new_blocks)
        graph = self._graphs.get(plan.shape)
        outputs = self._compute(plan.shape) if graph is None else graph.replay()
        return outputs.first(plan.num_rows)

    def sample(
        self, plan: SamplingPlan, greedy: SampledTokens, on_device: DeviceBuffer, masks: RowMasks | None
    ) -> SampledTokens:
        """Return the tokens of the pass that has just run, by a plan in fixed arrays. `greedy` is the pass's choice."""
        assert plan.fixed is not None
        self._sampling.load(plan, greedy, on_device, masks)
        graph = self._sampling_graphs.get(plan.fixed.shape)
        chosen = self._sampling.choose(plan.fixed.shape) if graph is None else graph.replay()
        return chosen.first(plan.fixed.num_rows)

    @torch.inference_mode()
    def capture(self, stream: torch.cuda.Stream) -> bool:
        """Capture a graph for every shape. The largest is the first, and the smaller ones share its memory.

        All captures of a process use one `stream`: cuBLAS keeps a workspace for each stream that it has met. Returns
        False, and keeps no graph, if a capture fails: for example if the model's code reads a value back from the
        device. Without the graphs of sampling it goes on.

        Raises:
            ModelLoadError: the device has too little memory for the graphs.
        """
        device = self._loaded.device
        started_s, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        try:
            for shape in reversed(self.shapes):
                self._graphs[shape] = self._capture_one(partial(self._compute, shape), pool, stream)
            self._capture_sampling(pool, stream)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"the CUDA graphs of {self._max_rows} sequences (max_num_seqs) do not fit the memory of {device}; "
                f"choose a smaller max_num_seqs or gpu_memory_utilization, or enforce_eager=true: {error}"
            ) from error
        except Exception as error:  # The errors of Triton and torch have no other common class.
            self._graphs.clear()
            _log.warning("steps run without CUDA graphs, and small ones are slower: %s", error)
            return False
        taken = (free_before - torch.cuda.mem_get_info(device)[0]) / _MEBIBYTE
        duration_s = time.monotonic() - started_s
        _log.info("captured %d CUDA graphs in %.1f s and %.0f MiB", self.num_graphs, duration_s, taken)
        return True

    def _capture_sampling(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture a graph for every shape of sampling. If one fails, keep none: graphs of passes do not need them."""
        try:
            for kind in self._sampling_shapes():
                self._sampling_graphs[kind] = self._capture_one(partial(self._sampling.choose, kind), pool, stream)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # The errors of Triton and torch have no other common class.
            self._sampling_graphs.clear()
            self._counts = None
            _log.warning("random sampling, penalties and masks run without CUDA graphs, and are slower: %s", error)

    def _capture_one(self, compute: Callable[[], _Outputs], pool: Any, stream: torch.cuda.Stream) -> _Graph[_Outputs]:
        device = self._loaded.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            compute()  # The first run compiles kernels and allocates workspaces.
            with _refusing_to_wait():
                compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
        return _Graph(graph, outputs)

    @property
    def _row_sizes(self) -> list[int]:
        return [shape.num_rows for shape in self.shapes if shape.num_chunks == 0]

    @cached_property
    def _sampling(self) -> FixedSampling:
        """Sampling in fixed arrays, of the logits that all shapes share. A pass has run."""
        assert self._counts is not None and self._logits is not None
        return FixedSampling(self._logits, self._counts)

    def _sampling_shapes(self) -> Iterable[SamplingShape]:
        """Return the shapes of sampling to capture, the largest first."""
        kinds = product(reversed(self._row_sizes), (True, False), (True, False))
        return () if self._counts is None else (SamplingShape(*kind) for kind in kinds)

    def _compute(self, shape: StepShape) -> StepOutputs:
        inputs = self._buffers.inputs(shape)
        contexts = [self._attention(self._cache, group.slots, group.plan) for group in inputs.groups]
        context = attention_by_group(self._cache.groups, contexts)
        states = None
        if inputs.states is not None:
            assert self._states is not None and self._cache.states is not None, "the model has recurrent layers"
            states = self._states(self._cache.states, inputs.states)
        rows = 0 if inputs.logits_rows is None else inputs.logits_rows
        logits = self._keep(self._loaded.logits(context, inputs.input_ids, inputs.position_ids, rows, states))
        # In the logits' own type: their order in float32 is the same, and a copy would take twice their memory.
        return StepOutputs(logits, sample_greedy(logits, self._loaded.cut_logits))

    def _keep(self, logits: Tensor) -> Tensor:
        """Copy `logits` into the buffer that all shapes share: kept apart, they would take several times its size."""
        if self._logits is None:
            self._logits = logits.new_empty(self._max_rows, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise an error if the host waits for the device.

    A capture that fails midway would leave torch's allocator in its capture state, so a trial run must fail first.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True, slots=True)
class _Graph(Generic[_Outputs]):
    """Captured operations and their output tensors, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    outputs: _Outputs

    def replay(self) -> _Outputs:
        self.graph.replay()
        return self.outputs
