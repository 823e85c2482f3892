"""Runs scheduled batches on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.model.attention import AttentionFactory
from replicas.model.batch_inputs import BatchInputs, InputPlan, Sampled, wants_prompt_logprobs
from replicas.model.cuda_graphs import PaddedDecodes
from replicas.model.gather_attention import GatherAttention
from replicas.model.kv_cache import KVCache
from replicas.model.launched_step import LaunchedPart, LaunchedScores, TorchStep
from replicas.model.loader import LoadedModel
from replicas.model.logprobs import launch_logprobs
from replicas.model.sampler import LaunchedTokens, Sampler
from replicas.model.transfers import Inbox, Outbox

# Bounds the logits held at once for a prompt that is scored.
_MAX_SCORED_TOKENS = 256


class TorchModelRunner:
    """The model, its KV cache and the sampler behind `ModelRunner`; used by one thread.

    A launch waits for nothing on a device that works by itself. The tokens that it samples stay there, and are the
    inputs of the next step before the host has seen them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        attention: AttentionFactory = GatherAttention,
        decodes: PaddedDecodes | None = None,
    ) -> None:
        """`decodes` computes the batches that it takes; without it `attention` is behind every forward pass."""
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._decodes = decodes
        self._sampler = Sampler(loaded.eos_token_ids)
        self._sampled = Sampled.nothing(loaded.device)

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

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Launch `batch` and wait for its results, one per item."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Begin to compute every scheduled token, write its KV, sample where an item samples.

        Items that score their prompt need logits at every position and run on their own, in bounded pieces;
        all others share one forward pass.
        """
        inbox = Inbox()
        shared = [index for index, item in enumerate(batch.items) if not wants_prompt_logprobs(item)]
        parts: list[LaunchedPart] = []
        if shared:
            parts.append(self._launch_shared([batch.items[index] for index in shared], shared, inbox))
        for index, item in enumerate(batch.items):
            if wants_prompt_logprobs(item):
                parts.append(self._launch_scored(item, index, inbox))
        inbox.close(self._loaded.device)
        self._sampled = _sampled_by(parts, batch, self._loaded.device)
        return TorchStep(len(batch.items), parts, inbox)

    def _launch_shared(self, items: list[ScheduledSequence], indices: list[int], inbox: Inbox) -> LaunchedPart:
        """One forward pass over items of which each samples or gives nothing."""
        sampling = [index for index, item in zip(indices, items, strict=True) if item.samples]
        if self._decodes is not None and self._decodes.takes(items):
            return LaunchedPart(sampling, self._decode(items, self._decodes, inbox), ())
        return LaunchedPart(sampling, self._forward(items, inbox).tokens, ())

    def _decode(self, items: list[ScheduledSequence], decodes: PaddedDecodes, inbox: Inbox) -> LaunchedTokens:
        outbox = Outbox()
        plan = self._sampler.plan(items, self._loaded.vocab_size, outbox)
        sent = decodes.send(items, self._sampled, outbox)
        placed = outbox.send(self._loaded.device)
        outputs = decodes.run(sent, placed).first(len(items))
        return plan.launch(outputs.logits, outputs.greedy, placed, inbox)

    def _launch_scored(self, item: ScheduledSequence, index: int, inbox: Inbox) -> LaunchedPart:
        """Run an item whose prompt tokens' log probabilities are wanted, a piece after the other."""
        scores: list[LaunchedScores] = []
        tokens = None
        for start in range(item.start, item.end, _MAX_SCORED_TOKENS):
            piece = item.part(start, min(_MAX_SCORED_TOKENS, item.end - start))
            forward = self._forward([piece], inbox)
            tokens = forward.tokens
            if forward.scores is not None:
                scores.append(forward.scores)
        return LaunchedPart([index], tokens, tuple(scores))

    def _forward(self, items: list[ScheduledSequence], inbox: Inbox) -> _Forward:
        """One forward pass, and what is wanted of its logits: all that it needs of the host travels at once."""
        outbox = Outbox()
        inputs = InputPlan(items, self._cache.block_size, self._sampled, outbox)
        sampling = [item for item in items if item.samples]
        plan = self._sampler.plan(sampling, self._loaded.vocab_size, outbox)
        is_scored = wants_prompt_logprobs(items[0])
        targets = _targets(items[0]) if is_scored else []
        target_span = outbox.ints(targets)
        placed = outbox.send(self._loaded.device)
        logits = self._logits(inputs.place(placed))
        scores = tokens = None
        if targets:
            most_top = items[0].sequence.request.params.prompt_logprobs or 0
            launched = launch_logprobs(logits[: len(targets)], placed.ints(target_span), most_top, inbox)
            scores = LaunchedScores(targets, most_top, launched)
        if sampling:
            # Of a scored prompt, every row has logits, and the last one gives the next token.
            tokens = plan.launch(logits[-len(sampling) :], None, placed, inbox)
        return _Forward(tokens, scores)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        """Logits [num_rows, vocab_size] of the rows that the items need, in the model's dtype."""
        context = self._attention(self._cache, inputs)
        return self._loaded.logits(context, inputs.input_ids, inputs.position_ids, inputs.logits_rows)


@dataclass(frozen=True, slots=True)
class _Forward:
    """What was asked of one forward pass's logits."""

    tokens: LaunchedTokens | None
    scores: LaunchedScores | None


def _sampled_by(parts: list[LaunchedPart], batch: ScheduledBatch, device: torch.device) -> Sampled:
    """All tokens that the parts sample, in one tensor."""
    sampling = [part for part in parts if part.tokens is not None]
    tokens = [part.tokens.tokens for part in parts if part.tokens is not None]
    if not tokens:
        return Sampled.nothing(device)
    indices = [index for part in sampling for index in part.indices]
    row_of = {batch.items[index].sequence: row for row, index in enumerate(indices)}
    return Sampled(tokens[0] if len(tokens) == 1 else torch.cat(tokens), row_of)


def _targets(piece: ScheduledSequence) -> list[int]:
    """The prompt tokens at positions start + 1 .. min(end, num_prompt_tokens - 1)."""
    sequence = piece.sequence
    return sequence.token_ids[piece.start + 1 : min(piece.end + 1, sequence.num_prompt_tokens)]
