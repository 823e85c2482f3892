"""Sampler: chooses the next token of each sequence from logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledSequence
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, PendingTensor
from replicas.model.sampling.logits_processors import LogitsProcessors
from replicas.model.sampling.logprobs import PendingLogprobs, launch_logprobs
from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.multinomial import (
    SentSamplingTensors,
    is_truncated,
    sample_full,
    sample_truncated,
    send_sampling_tensors,
    uniform,
)
from replicas.model.sampling.token_counts import SentPenalties, TokenCounts

_log = logging.getLogger(__name__)

# Lower temperatures are greedy: other tokens would have weight 0 in float32, or the division would overflow.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device, one per row."""

    tokens: Tensor  # [num_rows] int64
    is_finite: Tensor  # [num_rows] bool: False if the row's logits are not finite; its token is then any valid id


def sample_greedy(logits: Tensor) -> SampledTokens:
    """Return the most probable token of each row of logits [num_rows, vocab_size], any float type."""
    tokens = logits.argmax(dim=-1)
    # argmax prefers a NaN to any number, so the value at its index is finite only if the row has no NaN.
    return SampledTokens(tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite())


@cache
def has_draw_kernel(device: torch.device) -> bool:
    """Return True if a kernel draws from the most probable tokens on `device`, as it does on a GPU with Triton."""
    if device.type != "cuda":
        return False
    try:
        from replicas.model.sampling.triton_draw import check_draw  # Only torch for CUDA installs Triton.

        fault = check_draw(device)
    except ImportError as error:
        fault = str(error)
    if fault is not None:
        _log.warning(
            "top-p, top-k and min-p sort all logits and are slow: Triton's kernel does not work here: %s", fault
        )
    return fault is None


def token_counts(num_slots: int, vocab_size: int, device: torch.device) -> TokenCounts | None:
    """Return counts for `num_slots` sequences on a GPU with Triton; None elsewhere: there the host counts tokens."""
    if device.type != "cuda":
        return None
    try:
        from replicas.model.sampling.triton_penalties import check_penalties, penalize

        fault = check_penalties(device)
    except ImportError as error:
        fault = str(error)
    if fault is not None:
        _log.warning("penalties need the host and are slow: Triton's kernel does not work here: %s", fault)
        return None
    return TokenCounts(num_slots, vocab_size, device, penalize)


class Sampler:
    """Sampler of one step: greedy, random and scored rows, and the changes of their logits.

    A row's token depends only on the row's own logits, params, tokens and output index.
    """

    def __init__(
        self,
        items: Items[ScheduledSequence],
        eos_token_ids: frozenset[int],
        vocab_size: int,
        to_device: HostToDeviceBuffer,
        penalties: SentPenalties | None = None,
        *,
        has_counts: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """Plan the sampling of one token per item. The numbers for the device are added to `to_device`.

        If `has_counts`, `penalties` apply to the items, by counts on the device. If `batch_invariant`, all random rows
        are drawn by the kernel for truncated ones, which adds up integers.
        """
        self._items = items
        self._logits_processors = LogitsProcessors(
            items, eos_token_ids, vocab_size, to_device, penalties, has_counts=has_counts
        )
        self._params = [item.sequence.request.params for item in items]
        random = [row for row, params in enumerate(self._params) if params.temperature >= _GREEDY_TEMPERATURE]
        truncated = {row for row in random if batch_invariant or is_truncated(self._params[row], vocab_size)}
        self._truncated = self._send([row for row in random if row in truncated], items, vocab_size, to_device)
        self._full = self._send([row for row in random if row not in truncated], items, vocab_size, to_device)
        self._scored = [row for row, params in enumerate(self._params) if params.logprobs is not None]
        self._scored_span = to_device.ints(self._scored) if self._scored else None

    @property
    def is_greedy(self) -> bool:
        """True if every row takes the most probable token of its unchanged logits."""
        return self._logits_processors.is_empty and self._truncated is None and self._full is None

    def launch(
        self,
        logits: Tensor,
        greedy: SampledTokens | None,
        on_device: DeviceBuffer,
        to_host: DeviceToHostBuffer,
        masks: RowMasks | None = None,
    ) -> PendingTokens:
        """Launch the choice of tokens, without waiting for the device.

        Args:
            logits: [num_rows, vocab_size], any float type; not changed.
            greedy: the greedy choice, if it was computed already, else None.
            on_device: the numbers that the sampler sent.
            to_host: buffer that receives the tokens.
            masks: the tokens that constrained rows may take.
        """
        if greedy is None or masks is not None or not self.is_greedy:
            greedy = self._choose(logits, on_device, masks)
        logprobs = None
        if self._scored_span is not None:
            rows = on_device.ints(self._scored_span)
            max_top = max(self._params[row].logprobs or 0 for row in self._scored)
            logprobs = launch_logprobs(logits[rows], greedy.tokens[rows], max_top, to_host)
        pending = to_host.add(torch.stack([greedy.tokens, greedy.is_finite.long()]))
        return PendingTokens(greedy.tokens, pending, self._items, self._scored, logprobs)

    def _choose(self, logits: Tensor, on_device: DeviceBuffer, masks: RowMasks | None) -> SampledTokens:
        processed = self._logits_processors.apply(logits.float(), on_device)
        if masks is not None:
            # In float32 these may be the model's own logits, of which log probabilities are taken later.
            processed = processed.clone() if processed is logits else processed
            masks.apply(processed)
        sampled = sample_greedy(processed)
        for sampling in (self._full, self._truncated):
            if sampling is not None:
                rows = on_device.ints(sampling.rows)
                sampled.tokens[rows] = self._draw(processed, rows, sampling, on_device)
        return sampled

    def _draw(self, logits: Tensor, rows: Tensor, sampling: SentSamplingTensors, on_device: DeviceBuffer) -> Tensor:
        """Return the random tokens of `rows`, [len(rows)] int64."""
        if sampling is self._truncated and has_draw_kernel(logits.device):
            from replicas.model.sampling.triton_draw import draw_truncated

            flags = {"has_top_k": sampling.has_top_k, "has_top_p": sampling.has_top_p}
            return draw_truncated(logits, rows, on_device.floats(sampling.columns), **flags)
        row_logits = logits if len(rows) == len(logits) else logits[rows]
        return (sample_full if sampling is self._full else sample_truncated)(row_logits, sampling.place(on_device))

    def _send(
        self, rows: list[int], items: Items[ScheduledSequence], vocab_size: int, to_device: HostToDeviceBuffer
    ) -> SentSamplingTensors | None:
        if not rows:
            return None
        uniforms = [uniform(self._params[row].seed, items[row].output_index) for row in rows]
        return send_sampling_tensors(rows, [self._params[row] for row in rows], uniforms, vocab_size, to_device)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of one step's rows: on the device, and on their way to the host."""

    tokens: Tensor  # [num_rows] int64, on the device
    _pending: PendingTensor
    _items: Items[ScheduledSequence]
    _scored: list[int]
    _logprobs: PendingLogprobs | None

    def read(self, to_host: DeviceToHostBuffer) -> list[ItemResult]:
        """Return one result per row, after `to_host.wait()`."""
        tokens, finite = to_host[self._pending].tolist()
        results = [
            ItemResult(token_id=token) if is_finite else ItemResult(error=_fault(item))
            for item, token, is_finite in zip(self._items, tokens, finite, strict=True)
        ]
        if self._logprobs is not None:
            chosen = [tokens[row] for row in self._scored]
            num_logprobs = [self._items[row].sequence.request.params.logprobs or 0 for row in self._scored]
            for row, logprobs in zip(self._scored, self._logprobs.read(to_host, chosen, num_logprobs), strict=True):
                if finite[row]:
                    results[row] = ItemResult(token_id=tokens[row], logprobs=logprobs)
        return results


def _fault(item: ScheduledSequence) -> str:
    """Return the reason why a row has no finite logit."""
    constraint, params = item.sequence.constraint, item.sequence.request.params
    if constraint is None and not (params.allowed_token_ids or params.bad_words):
        return "the model's logits are not finite numbers"
    reason = None if constraint is None else constraint.error
    return reason or "no token satisfies all of grammar, allowed_token_ids, bad_words, min_tokens and stop_token_ids"
