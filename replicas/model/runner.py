"""The model runner: launches scheduled batches on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache
from replicas.model.batch.inputs import BatchInputs, InputPlan, LastSampledTokens, wants_prompt_logprobs
from replicas.model.batch.transfers import DeviceToHostBuffer, HostToDeviceBuffer
from replicas.model.decode_graphs.graphs import DecodeGraphRunner
from replicas.model.loading.loader import LoadedModel
from replicas.model.sampling.logprobs import launch_logprobs
from replicas.model.sampling.sampler import PendingTokens, Sampler
from replicas.model.step import PendingPart, PendingScores, TorchStep

# Prompt tokens scored per forward pass. It bounds the memory of their logits.
_MAX_SCORED_TOKENS = 256


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
        decode_graphs: DecodeGraphRunner | None = None,
    ) -> None:
        """Make a runner. Batches that `decode_graphs` can run go there; all others use `attention`."""
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._decode_graphs = decode_graphs
        self._sampler = Sampler(loaded.eos_token_ids)
        self._last_sampled = LastSampledTokens.none(loaded.device)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that sequences can hold."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Number of token slots in a block."""
        return self._cache.block_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence."""
        return self._loaded.max_model_len

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Launch `batch`, wait for it and return one result per item."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Launch the forward passes of `batch`, which write its KV and sample where an item samples.

        An item that scores its prompt needs logits at every position. It runs alone, in pieces of bounded size. All
        other items share one forward pass.
        """
        to_host = DeviceToHostBuffer()
        shared = [index for index, item in enumerate(batch.items) if not wants_prompt_logprobs(item)]
        parts: list[PendingPart] = []
        if shared:
            parts.append(self._launch_shared([batch.items[index] for index in shared], shared, to_host))
        for index, item in enumerate(batch.items):
            if wants_prompt_logprobs(item):
                parts.append(self._launch_scored(item, index, to_host))
        to_host.close(self._loaded.device)
        self._last_sampled = _last_sampled_tokens(parts, batch, self._loaded.device)
        return TorchStep(len(batch.items), parts, to_host)

    def _launch_shared(
        self, items: list[ScheduledSequence], indices: list[int], to_host: DeviceToHostBuffer
    ) -> PendingPart:
        """Launch one forward pass over items that sample one token or none."""
        sampling = [index for index, item in zip(indices, items, strict=True) if item.samples]
        if self._decode_graphs is not None and self._decode_graphs.can_run(items):
            return PendingPart(sampling, self._decode(items, self._decode_graphs, to_host), ())
        return PendingPart(sampling, self._forward(items, to_host).tokens, ())

    def _decode(
        self, items: list[ScheduledSequence], decode_graphs: DecodeGraphRunner, to_host: DeviceToHostBuffer
    ) -> PendingTokens:
        to_device = HostToDeviceBuffer()
        plan = self._sampler.plan(items, self._loaded.vocab_size, to_device)
        sent = decode_graphs.send(items, self._last_sampled, to_device)
        on_device = to_device.send(self._loaded.device)
        outputs = decode_graphs.run(sent, on_device).first(len(items))
        return plan.launch(outputs.logits, outputs.greedy, on_device, to_host)

    def _launch_scored(self, item: ScheduledSequence, index: int, to_host: DeviceToHostBuffer) -> PendingPart:
        """Launch an item whose prompt log probabilities are wanted, one piece after the other."""
        scores: list[PendingScores] = []
        tokens = None
        for start in range(item.start, item.end, _MAX_SCORED_TOKENS):
            piece = item.part(start, min(_MAX_SCORED_TOKENS, item.end - start))
            forward = self._forward([piece], to_host)
            tokens = forward.tokens
            if forward.scores is not None:
                scores.append(forward.scores)
        return PendingPart([index], tokens, tuple(scores))

    def _forward(self, items: list[ScheduledSequence], to_host: DeviceToHostBuffer) -> _Forward:
        """Launch one forward pass, sampling and scoring. All its host data goes to the device in one copy."""
        to_device = HostToDeviceBuffer()
        inputs = InputPlan(items, self._cache.block_size, self._last_sampled, to_device)
        sampling = [item for item in items if item.samples]
        plan = self._sampler.plan(sampling, self._loaded.vocab_size, to_device)
        is_scored = wants_prompt_logprobs(items[0])
        targets = _targets(items[0]) if is_scored else []
        target_span = to_device.ints(targets)
        on_device = to_device.send(self._loaded.device)
        logits = self._logits(inputs.place(on_device))
        scores = tokens = None
        if targets:
            max_top = items[0].sequence.request.params.prompt_logprobs or 0
            launched = launch_logprobs(logits[: len(targets)], on_device.ints(target_span), max_top, to_host)
            scores = PendingScores(targets, max_top, launched)
        if sampling:
            # With a scored prompt every row has logits, and the last row samples the next token.
            tokens = plan.launch(logits[-len(sampling) :], None, on_device, to_host)
        return _Forward(tokens, scores)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        """Return logits [num_rows, vocab_size] of the rows that the items need, in the model's dtype."""
        context = self._attention(self._cache, inputs)
        return self._loaded.logits(context, inputs.input_ids, inputs.position_ids, inputs.logits_rows)


@dataclass(frozen=True, slots=True)
class _Forward:
    """Pending results of one forward pass."""

    tokens: PendingTokens | None
    scores: PendingScores | None


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
