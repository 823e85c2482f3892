"""Planner of steps: makes messages of plain numbers from scheduled batches, and items' results from a step's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from replicas.engine.batch import BatchColumns, ItemResult, ScheduledBatch, ScheduledSequence, StepResults
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import NO_LAST_ROWS, InputPlan, PooledRows, wants_prompt_logprobs
from replicas.model.batch.transfers import DeviceToHostBuffer, HostToDeviceBuffer, PendingTensor, Span
from replicas.model.cuda_graphs.padding import PaddedPlan, StepPadding
from replicas.model.hardware.limits import cpu_limit
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.sampling.fixed_arrays import SamplingPadding
from replicas.model.sampling.logprobs import PendingLogprobs
from replicas.model.sampling.masks import MaskThreads, PendingMasks
from replicas.model.sampling.sampler import PendingTokens, SamplingPlan, SamplingPlanner
from replicas.model.sampling.token_counts import CountSlots

# Prompt tokens scored per forward pass. It bounds the memory of their logits.
_MAX_SCORED_TOKENS = 256
# Threads that fill token masks. A mask takes 5 to 100 us, so a few threads are enough for any batch.
_MAX_MASK_THREADS = 4


@dataclass(frozen=True, slots=True)
class FlatPass:
    """Forward pass without padding. Its last `num_rows` rows of logits sample."""

    inputs: InputPlan
    num_rows: int
    targets: Span
    """Prompt tokens to score, one for each of the first rows of logits."""
    max_top: int
    """Number of most probable tokens to score in each of these rows."""
    pooled: PooledRows | None = None
    """Rows whose hidden states are pooled; None: there are none."""


class StepMessage(NamedTuple):
    """Step as plain numbers: any runner of the same model that has run the messages before it can run it.

    It can be pickled. The passes run in order, the padded one first; the rows that sample are in their order.
    """

    words: np.ndarray
    """Numbers for the device, [num_words] int64. All spans are ranges of it."""
    num_new_blocks: int
    """New blocks in the tables of padded passes. Their cells and they themselves are the last words."""
    padded: PaddedPlan | None
    flat: tuple[FlatPass, ...]
    sampling: SamplingPlan | None
    """None: no row samples."""


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """Prompt tokens of the batch's item at `index` that one pass scores."""

    index: int
    targets: list[int]
    num_top: int


class PlannedStep(NamedTuple):
    """Message of a step, and the sequences that its results belong to."""

    message: StepMessage
    masks: PendingMasks | None
    """Masks of the rows that may not take every token: the second message."""
    batch: ScheduledBatch
    indices: np.ndarray
    """Index in the batch of each row that samples."""
    sampling: BatchColumns
    """Items of these rows."""
    pieces: Items[ScoredPiece]
    """Scored prompt tokens, one piece for each pass that scores some."""
    pooled: Items[int]
    """Indices of the items whose hidden states are pooled."""

    def read(
        self,
        tokens: PendingTokens | None,
        scores: list[PendingLogprobs],
        to_host: DeviceToHostBuffer,
        pooled: PendingTensor | None = None,
    ) -> StepResults:
        """Return one result per item of the batch, after `to_host.wait()`.

        `scores` has an entry for each of `pieces`, `pooled` a row for each index of the field.
        """
        sampled = None if tokens is None else tokens.read(to_host, self.sampling)
        if sampled is not None and self.sampling is self.batch.columns:
            return sampled
        results = StepResults(np.full(len(self.batch), -1), {})
        if sampled is not None:
            results.token_ids[self.indices] = sampled.token_ids
            results.others.update((self.indices.item(row), result) for row, result in sampled.others.items())
        if pooled is not None:
            vectors = to_host[pooled].numpy()
            results.others.update((index, ItemResult(pooled=vectors[row])) for row, index in enumerate(self.pooled))
        for piece, pending in zip(self.pieces, scores, strict=True):
            logprobs = pending.read(to_host, piece.targets, [piece.num_top] * len(piece.targets))
            result = results[piece.index]
            if result.error is None and any(math.isnan(entry.chosen.logprob) for entry in logprobs):
                result = ItemResult(error="the model's logits are not finite numbers")
            if result.error is None:
                result = replace(result, prompt_logprobs=(*result.prompt_logprobs, *logprobs))
            results.others[piece.index] = result
        return results


class _Passes(NamedTuple):
    """Forward passes of a step, and what the items get of them."""

    padded: PaddedPlan | None
    flat: list[FlatPass]
    indices: np.ndarray
    """Items that sample, in order of their rows of logits."""
    shared: BatchColumns
    """Items that share a pass."""
    pooled: Items[int] = ()
    pieces: Items[ScoredPiece] = ()
    are_in_order: bool = True
    """True if the rows of logits are in order of the items."""


class StepPlanner:
    """Planner of one runner's steps. It knows what the device holds after the steps planned so far.

    Invariant: steps are planned and run in the same order, each within `running`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        padding: StepPadding | None,
        slots: CountSlots | None,
        sampling_padding: SamplingPadding | None = None,
    ) -> None:
        """Make a planner of steps over `cache`. Batches that `padding` has a shape for are padded.

        `slots` are those of the counts on the device; None: the host counts the tokens for penalties. After a padded
        pass, `sampling_padding` plans the sampling too; None: it is not captured.
        """
        self._block_size = cache.block_size
        self._factors = [group.layers_per_column for group in cache.groups]
        self._padding = padding
        self._slots = slots
        self._sampling = SamplingPlanner(
            loaded.eos_token_ids, loaded.vocab_size, slots, batch_invariant=loaded.is_batch_invariant
        )
        self._sampling_padding = sampling_padding
        self._masks = MaskThreads(loaded.vocab_size, min(_MAX_MASK_THREADS, math.ceil(cpu_limit().num_cpus)))
        self._last_rows = NO_LAST_ROWS

    def plan(self, batch: ScheduledBatch) -> PlannedStep:
        """Plan the forward passes of `batch`, which write its KV and sample where an item samples.

        An item that scores its prompt needs logits at every position. It runs alone, in pieces of bounded size. All
        other items share one forward pass.
        """
        self._masks.settle()
        to_device, columns = HostToDeviceBuffer(), batch.columns
        passes = self._plan_passes(columns, to_device)
        indices = passes.indices
        sampling = columns if passes.are_in_order and len(indices) == len(batch) else columns.take(indices)
        plan = self._sampling.plan(sampling, self._last_rows, to_device) if len(indices) else None
        masks = self._masks.masks_of(sampling)
        if plan is not None and self._sampling_padding is not None and passes.padded is not None and not passes.flat:
            plan = self._sampling_padding.plan(plan, len(indices), to_device, has_masks=masks is not None)
        self._last_rows = self._last_rows.after(sampling)
        num_new_blocks = 0
        if self._padding is not None and passes.padded is not None:
            num_new_blocks = self._padding.add_blocks(passes.shared, to_device)
        message = StepMessage(to_device.words, num_new_blocks, passes.padded, tuple(passes.flat), plan)
        return PlannedStep(message, masks, batch, indices, sampling, passes.pieces, passes.pooled)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forget what the device holds if the context, which plans or runs a step, fails."""
        try:
            yield
        except Exception:
            self._last_rows = NO_LAST_ROWS
            for device_state in (self._padding, self._slots):
                if device_state is not None:
                    device_state.forget()
            raise

    def _plan_passes(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> _Passes:
        """Plan the forward passes: one for each piece of a scored prompt, and one for all other items."""
        if self._padding is not None:
            padded = self._padding.advance(columns, self._last_rows, to_device)
            if padded is not None:
                return _Passes(padded, [], columns.samples.nonzero()[0], columns)
        num_items = len(columns.sequences)
        scored = [
            index for index in range(columns.num_decodes, num_items) if wants_prompt_logprobs(columns.item(index))
        ]
        if not scored:
            return self._plan_shared(columns, to_device)
        others = np.setdiff1d(np.arange(num_items), scored)
        passes = self._plan_shared(columns.take(others), to_device)
        pieces = []
        for index in scored:
            for piece in _pieces_of(columns.item(index)):
                targets, num_top = _targets(piece), piece.sequence.request.params.prompt_logprobs or 0
                passes.flat.append(self._flat_pass(BatchColumns.of([piece]), targets, num_top, to_device))
                if targets:
                    pieces.append(ScoredPiece(index, targets, num_top))
        order = np.append(others, scored)
        return passes._replace(
            indices=order[columns.samples[order]],
            pooled=others[list(passes.pooled)].tolist(),
            pieces=pieces,
            are_in_order=False,
        )

    def _plan_shared(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> _Passes:
        """Plan one pass over items that sample one token or none; it is padded if there is a shape for it.

        With an item whose hidden states are pooled no pass is padded.
        """
        indices = columns.samples.nonzero()[0]
        if not columns.sequences:
            return _Passes(None, [], indices, columns)
        pooled_rows, pooled = PooledRows.of(columns, to_device)
        shape = None if self._padding is None or pooled else self._padding.shape_of(columns)
        if self._padding is not None and shape is not None:
            padded = self._padding.plan(columns, shape, self._last_rows, to_device)
            return _Passes(padded, [], indices, columns)
        flat = replace(self._flat_pass(columns, [], 0, to_device), pooled=pooled_rows)
        return _Passes(None, [flat], indices, columns, pooled)

    def _flat_pass(
        self, columns: BatchColumns, targets: list[int], max_top: int, to_device: HostToDeviceBuffer
    ) -> FlatPass:
        inputs = InputPlan.of(columns, self._block_size, self._last_rows, to_device, self._factors)
        return FlatPass(inputs, int(np.count_nonzero(columns.samples)), to_device.ints(targets), max_top)


def _pieces_of(item: ScheduledSequence) -> Iterator[ScheduledSequence]:
    for start in range(item.start, item.end, _MAX_SCORED_TOKENS):
        yield item.part(start, min(_MAX_SCORED_TOKENS, item.end - start))


def _targets(piece: ScheduledSequence) -> list[int]:
    """Return the prompt tokens at positions start + 1 .. min(end, num_prompt_tokens - 1)."""
    sequence = piece.sequence
    return sequence.token_ids[piece.start + 1 : min(piece.end + 1, sequence.num_prompt_tokens)]
