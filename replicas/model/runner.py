"""Runs scheduled batches on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.model.attention import AttentionContext
from replicas.model.batch_inputs import BatchInputs, build_inputs, wants_prompt_logprobs
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache
from replicas.model.loader import LoadedModel
from replicas.model.logprobs import position_logprobs
from replicas.model.sampler import Sampler
from replicas.protocol import PositionLogprobs

# Bounds the logits held at once for a prompt that is scored.
_MAX_SCORED_TOKENS = 256

AttentionFactory = Callable[[KVCache, BatchInputs], AttentionContext]
"""How one forward pass computes attention: the seam for kernels of one device."""


class TorchModelRunner:
    """The model, its KV cache and the sampler behind `ModelRunner`; used by one thread."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, attention: AttentionFactory = GatherAttention) -> None:
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._sampler = Sampler(loaded.eos_token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self._cache.block_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence that the model was loaded for."""
        return self._loaded.max_model_len

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Compute every scheduled token, write its KV, sample where an item samples; one result per item.

        Items that score their prompt need logits at every position and run on their own, in bounded pieces;
        all others share one forward pass.
        """
        results = [ItemResult()] * len(batch.items)
        scored = [index for index, item in enumerate(batch.items) if wants_prompt_logprobs(item)]
        shared = [index for index, item in enumerate(batch.items) if not wants_prompt_logprobs(item)]
        if shared:
            shared_results = self._run([batch.items[index] for index in shared])
            for index, result in zip(shared, shared_results, strict=True):
                results[index] = result
        for index in scored:
            results[index] = self._score(batch.items[index])
        return results

    def _run(self, items: list[ScheduledSequence]) -> list[ItemResult]:
        """One forward pass over items of which each samples or gives nothing."""
        logits = self._forward(items)
        sampling = [index for index, item in enumerate(items) if item.samples]
        results = [ItemResult()] * len(items)
        if sampling:
            sampled = self._sampler.sample(logits, [items[index].sequence for index in sampling])
            for index, result in zip(sampling, sampled, strict=True):
                results[index] = result
        return results

    def _score(self, item: ScheduledSequence) -> ItemResult:
        """Run an item whose prompt tokens' log probabilities are wanted, a piece after the other."""
        scores: list[PositionLogprobs] = []
        result = ItemResult()
        for start in range(item.start, item.end, _MAX_SCORED_TOKENS):
            piece = ScheduledSequence(item.sequence, start, min(_MAX_SCORED_TOKENS, item.end - start))
            logits = self._forward([piece])
            if wants_prompt_logprobs(piece):
                scores.extend(_prompt_logprobs(logits, piece))
            if piece.samples:
                result = self._sampler.sample(logits[-1:], [item.sequence])[0]
        if result.error is None and any(math.isnan(score.chosen.logprob) for score in scores):
            result = ItemResult(error="the model's logits are not finite numbers")
        return replace(result, prompt_logprobs=() if result.error else tuple(scores))

    def _forward(self, items: list[ScheduledSequence]) -> Tensor:
        """Logits [num_rows, vocab_size] of the rows that the items need, in the model's dtype."""
        inputs = build_inputs(items, self._cache.block_size, self._loaded.device)
        with self._loaded.port.using(self._attention(self._cache, inputs)):
            logits: Tensor = self._loaded.model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logits_rows,
            ).logits
        return logits[0]


def _prompt_logprobs(logits: Tensor, piece: ScheduledSequence) -> list[PositionLogprobs]:
    """Of the prompt tokens at positions start + 1 .. min(end, num_prompt_tokens - 1)."""
    sequence = piece.sequence
    targets = sequence.token_ids[piece.start + 1 : min(piece.end + 1, sequence.num_prompt_tokens)]
    num_top = sequence.request.params.prompt_logprobs or 0
    return position_logprobs(logits[: len(targets)], targets, [num_top] * len(targets))
