"""The model runner: launches scheduled batches on one device, as steps whose results are pending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import BatchInputs, InputPlan, LastSampledTokens, wants_prompt_logprobs
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer
from replicas.model.cuda_graphs.buffers import StepShape
from replicas.model.cuda_graphs.graphs import GraphRunner
from replicas.model.hardware.device import cache_dtype_name
from replicas.model.hardware.limits import cpu_limit
from replicas.model.loading.loader import LoadedModel
from replicas.model.sampling.logprobs import PendingLogprobs, launch_logprobs
from replicas.model.sampling.masks import MaskThreads, PendingMasks
from replicas.model.sampling.sampler import PendingTokens, SampledTokens, Sampler
from replicas.model.sampling.token_counts import TokenCounts
from replicas.protocol import PositionLogprobs

# Prompt tokens scored per forward pass. It bounds the memory of their logits.
_MAX_SCORED_TOKENS = 256
# Threads that fill token masks. A mask takes 5 to 100 us, so a few threads are enough for any batch.
_MAX_MASK_THREADS = 4


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Log probabilities of prompt tokens, on their way to the host."""

    targets: list[int]
    num_top: int
    logprobs: PendingLogprobs

    def read(self, to_host: DeviceToHostBuffer) -> list[PositionLogprobs]:
        """Return the log probabilities, one per target. Call it after `to_host.wait()`."""
        return self.logprobs.read(to_host, self.targets, [self.num_top] * len(self.targets))


@dataclass(frozen=True, slots=True)
class PendingPart:
    """Pending results of the batch's items at `indices`, which sample a token or score their prompt."""

    indices: list[int]
    tokens: PendingTokens | None
    scores: tuple[PendingScores, ...]

    def with_scores(self, result: ItemResult, to_host: DeviceToHostBuffer) -> ItemResult:
        """Return `result` with the prompt's log probabilities, or an error if one of them is NaN."""
        if not self.scores:
            return result
        scores = [logprobs for piece in self.scores for logprobs in piece.read(to_host)]
        if result.error is None and any(math.isnan(score.chosen.logprob) for score in scores):
            result = ItemResult(error="the model's logits are not finite numbers")
        return replace(result, prompt_logprobs=() if result.error else tuple(scores))


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """Launched forward pass over the batch's items at `indices`, before the sampling."""

    indices: list[int]
    sampler: Sampler | None
    """Sampler of one token per item; None: no item samples."""
    logits: Tensor  # [len(indices), vocab_size]
    greedy: SampledTokens | None
    on_device: DeviceBuffer
    masks: PendingMasks | None
    scores: tuple[PendingScores, ...] = ()

    def sample(self, to_host: DeviceToHostBuffer) -> PendingPart:
        """Launch the sampling, after the masks of constrained items have been filled."""
        tokens = None
        if self.sampler is not None:
            masks = None if self.masks is None else self.masks.place(self.logits.device)
            tokens = self.sampler.launch(self.logits, self.greedy, self.on_device, to_host, masks)
        return PendingPart(self.indices, tokens, self.scores)


class TorchStep:
    """Launched step: `sample` launches the sampling of constrained sequences, `collect` waits for the results."""

    def __init__(self, num_items: int, to_host: DeviceToHostBuffer, sample: Callable[[], list[PendingPart]]) -> None:
        self._num_items = num_items
        self._to_host = to_host
        self._launch_sampling = sample
        self._parts: list[PendingPart] | None = None

    def sample(self) -> None:
        """Launch the sampling, unless that is done."""
        if self._parts is None:
            self._parts = self._launch_sampling()

    def collect(self) -> list[ItemResult]:
        """Wait for the step and return one result per item."""
        assert self._parts is not None
        self._to_host.wait()
        results = [ItemResult()] * self._num_items
        for part in self._parts:
            sampled = part.tokens.read(self._to_host) if part.tokens else [ItemResult()] * len(part.indices)
            for index, result in zip(part.indices, sampled, strict=True):
                results[index] = part.with_scores(result, self._to_host)
        return results


class TorchModelRunner:
    """`ModelRunner` over a torch model, its KV cache and the sampler. One thread uses it.

    On a GPU a launch does not wait for the device. Sampled tokens stay on the device, where the next step reads them
    before the host has received them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        attention: AttentionBackend = GatherAttention,
        graphs: GraphRunner | None = None,
        counts: TokenCounts | None = None,
    ) -> None:
        """Make a runner. Batches that `graphs` has a shape for go there; all others use `attention`.

        `counts` has a slot for each running sequence; None: the host counts the tokens for penalties.
        """
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self.kernels: str = getattr(attention, "kernels", "")
        """Kernels that compute attention."""
        self._graphs = graphs
        self._counts = counts
        self._masks = MaskThreads(loaded.vocab_size, min(_MAX_MASK_THREADS, math.ceil(cpu_limit().num_cpus)))
        self._last_sampled = LastSampledTokens.none(loaded.device)

    @property
    def counts_tokens(self) -> bool:
        """True if penalties need no token on the host."""
        return self._counts is not None

    @property
    def num_blocks(self) -> int:
        """Number of blocks that sequences can hold."""
        return self._cache.num_blocks

    @property
    def cache_dtype(self) -> str:
        """Number format of keys and values in the KV cache."""
        return cache_dtype_name(self._cache.dtype)

    @property
    def block_size(self) -> int:
        """Number of tokens in a block of the KV cache."""
        return self._cache.block_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model has."""
        return self._loaded.vocab_size

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Launch `batch`, wait for it and return one result per item."""
        step = self.launch(batch)
        step.sample()
        return step.collect()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Launch the forward passes of `batch`, which write its KV and sample where an item samples.

        An item that scores its prompt needs logits at every position. It runs alone, in pieces of bounded size. All
        other items share one forward pass.
        """
        self._masks.settle()
        with self._counts_known():
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> TorchStep:
        to_host = DeviceToHostBuffer()
        shared = [index for index, item in enumerate(batch.items) if not wants_prompt_logprobs(item)]
        parts: list[ForwardPart] = []
        if shared:
            parts.append(self._launch_shared([batch.items[index] for index in shared], shared, to_host))
        for index, item in enumerate(batch.items):
            if wants_prompt_logprobs(item):
                parts.append(self._launch_scored(item, index, to_host))
        step = TorchStep(len(batch.items), to_host, partial(self._sample, batch, parts, to_host))
        if not batch.is_constrained:
            step.sample()
        return step

    @torch.inference_mode()
    def _sample(
        self, batch: ScheduledBatch, parts: list[ForwardPart], to_host: DeviceToHostBuffer
    ) -> list[PendingPart]:
        """Launch the sampling of a step, the last that was launched."""
        with self._counts_known(), self._loaded.ops():
            sampled = [part.sample(to_host) for part in parts]
        to_host.close(self._loaded.device)
        self._last_sampled = _last_sampled_tokens(sampled, batch, self._loaded.device)
        return sampled

    def _launch_shared(
        self, items: list[ScheduledSequence], indices: list[int], to_host: DeviceToHostBuffer
    ) -> ForwardPart:
        """Launch one forward pass over items that sample one token or none."""
        sampling = [index for index, item in zip(indices, items, strict=True) if item.samples]
        shape = None if self._graphs is None else self._graphs.shape_of(items)
        if self._graphs is not None and shape is not None:
            return self._replay(items, sampling, self._graphs, shape)
        return self._forward(items, sampling, to_host)

    def _replay(
        self, items: list[ScheduledSequence], indices: list[int], graphs: GraphRunner, shape: StepShape
    ) -> ForwardPart:
        """Launch one forward pass, padded to `shape`."""
        to_device = HostToDeviceBuffer()
        sampling = [item for item in items if item.samples]
        sampler = self._sampler(sampling, to_device)
        sent = graphs.send(items, shape, self._last_sampled, to_device)
        on_device = to_device.send(self._loaded.device)
        masks = self._masks.masks_of(sampling)
        outputs = graphs.run(sent, on_device).first(len(sampling))
        return ForwardPart(indices, sampler if sampling else None, outputs.logits, outputs.greedy, on_device, masks)

    def _sampler(self, items: list[ScheduledSequence], to_device: HostToDeviceBuffer) -> Sampler:
        sent = None if self._counts is None else self._counts.send(items, self._last_sampled, to_device)
        eos_token_ids, vocab_size = self._loaded.eos_token_ids, self._loaded.vocab_size
        return Sampler(
            items,
            eos_token_ids,
            vocab_size,
            to_device,
            sent,
            has_counts=self._counts is not None,
            batch_invariant=self._loaded.is_batch_invariant,
        )

    @contextmanager
    def _counts_known(self) -> Iterator[None]:
        """Forget the counts if the launch fails within the context: it may have changed some of them."""
        try:
            yield
        except Exception:
            if self._counts is not None:
                self._counts.forget()
            raise

    def _launch_scored(self, item: ScheduledSequence, index: int, to_host: DeviceToHostBuffer) -> ForwardPart:
        """Launch an item whose prompt log probabilities are wanted, one piece after the other."""
        starts = range(item.start, item.end, _MAX_SCORED_TOKENS)
        pieces = [item.part(start, min(_MAX_SCORED_TOKENS, item.end - start)) for start in starts]
        parts = [self._forward([piece], [index], to_host) for piece in pieces]
        scores = tuple(scores for part in parts for scores in part.scores)
        # The copy frees the logits of the piece's other rows.
        return replace(parts[-1], scores=scores, logits=parts[-1].logits.clone())

    def _forward(self, items: list[ScheduledSequence], indices: list[int], to_host: DeviceToHostBuffer) -> ForwardPart:
        """Launch one forward pass and its scoring. The host's data, but the masks, goes to the device in one copy."""
        to_device = HostToDeviceBuffer()
        inputs = InputPlan(items, self._cache.block_size, self._last_sampled, to_device)
        sampling = [item for item in items if item.samples]
        sampler = self._sampler(sampling, to_device)
        targets = _targets(items[0]) if wants_prompt_logprobs(items[0]) else []
        target_span = to_device.ints(targets)
        on_device = to_device.send(self._loaded.device)
        masks = self._masks.masks_of(sampling)
        logits = self._logits(inputs.place(on_device))
        scores: tuple[PendingScores, ...] = ()
        if targets:
            max_top = items[0].sequence.request.params.prompt_logprobs or 0
            with self._loaded.ops():
                launched = launch_logprobs(logits[: len(targets)], on_device.ints(target_span), max_top, to_host)
            scores = (PendingScores(targets, max_top, launched),)
        # With a scored prompt every row has logits, and the last row samples the next token.
        rows = logits[len(logits) - len(sampling) :]
        return ForwardPart(indices, sampler if sampling else None, rows, None, on_device, masks, scores)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        """Return logits [num_rows, vocab_size] of the rows that the items need, in the model's dtype."""
        context = self._attention(self._cache, inputs)
        return self._loaded.logits(context, inputs.input_ids, inputs.position_ids, inputs.logits_rows)


def _last_sampled_tokens(parts: list[PendingPart], batch: ScheduledBatch, device: torch.device) -> LastSampledTokens:
    """Return all tokens that the parts sample, in one tensor."""
    sampling = [part for part in parts if part.tokens is not None]
    tokens = [part.tokens.tokens for part in parts if part.tokens is not None]
    if not tokens:
        return LastSampledTokens.none(device)
    indices = [index for part in sampling for index in part.indices]
    row_by_sequence = {batch.items[index].sequence: row for row, index in enumerate(indices)}
    return LastSampledTokens(tokens[0] if len(tokens) == 1 else torch.cat(tokens), row_by_sequence)


def _targets(piece: ScheduledSequence) -> list[int]:
    """Return the prompt tokens at positions start + 1 .. min(end, num_prompt_tokens - 1)."""
    sequence = piece.sequence
    return sequence.token_ids[piece.start + 1 : min(piece.end + 1, sequence.num_prompt_tokens)]
