"""Sampler: chooses the next token of each sequence from logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ItemResult, ScheduledSequence, StepResults
from replicas.model.batch.inputs import LastRows
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, PendingTensor, Span
from replicas.model.hardware.selfcheck import Agree, alone, kernels_work
from replicas.model.parallel.cut_logits import CutLogits
from replicas.model.sampling.logits_processors import NO_CHANGES, LogitsChanges, LogitsProcessors
from replicas.model.sampling.logprobs import PendingLogprobs, launch_logprobs
from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.multinomial import (
    RandomColumns,
    RandomRows,
    sample_full,
    sample_truncated,
)
from replicas.model.sampling.token_counts import CountSlots, TokenCounts

_NO_ROWS = Span(0)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device, one per row."""

    tokens: Tensor  # [num_rows] int64
    is_finite: Tensor  # [num_rows] bool: False if the row's logits are not finite; its token is then any valid id

    def first(self, num_rows: int) -> SampledTokens:
        """Return the tokens of the first `num_rows` rows."""
        return SampledTokens(self.tokens[:num_rows], self.is_finite[:num_rows])


def sample_greedy(logits: Tensor, cut: CutLogits | None = None) -> SampledTokens:
    """Return the most probable token of each row of logits [num_rows, vocab_size], any float type.

    Of logits that are `cut`, each rank gives its part.
    """
    if cut is not None:
        highest, tokens = cut.highest(logits)
        return SampledTokens(tokens, highest.isfinite())
    tokens = _most_probable(logits)
    # argmax prefers a NaN to any number, so the value at its index is finite only if the row has no NaN.
    return SampledTokens(tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite())


def _most_probable(logits: Tensor) -> Tensor:
    if not has_draw_kernel(logits.device):
        return logits.argmax(dim=-1)
    from replicas.model.sampling.triton_draw import most_probable

    return most_probable(logits)


@cache
def has_draw_kernel(device: torch.device) -> bool:
    """Return True if kernels find and draw tokens on `device`, as they do on a GPU with Triton."""

    def check() -> str | None:
        from replicas.model.sampling.triton_draw import check_draw

        return check_draw(device)

    return kernels_work(device, check, "top-p, top-k and min-p sort all logits and are slow")


def token_counts(
    num_slots: int, vocab_size: int, device: torch.device, agree: Agree = alone
) -> TokenCounts | None:  # fmt: skip
    """Return counts for `num_slots` sequences on a GPU with Triton; None elsewhere: there the host counts tokens.

    The kernel must work on all ranks that `agree`.
    """

    def check() -> str | None:
        from replicas.model.sampling.triton_penalties import check_penalties

        return check_penalties(device)

    if not kernels_work(device, check, "penalties need the host and are slow", agree):
        return None
    from replicas.model.sampling.triton_penalties import penalize

    return TokenCounts(num_slots, vocab_size, device, penalize)


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """Kind of sampling, and the number of rows to which a step's rows are padded."""

    num_rows: int
    is_truncated: bool
    """True if some row draws from a part of the tokens."""
    has_changes: bool
    """True if some logits are changed or masked."""

    @property
    def num_cells(self) -> int:
        """Number of cells of an array of rows: an even one, so that each begins at a multiple of 16 bytes."""
        return self.num_rows + self.num_rows % 2


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """Sampling of one step's rows in the fixed arrays of a captured graph, see `fixed_arrays`."""

    shape: SamplingShape
    num_rows: int
    """Rows of the step: the first ones."""
    words: Span


class SamplingPlan(NamedTuple):
    """Sampling of one step's rows in the step's numbers: random and scored rows, and changes of logits."""

    changes: LogitsChanges
    truncated: RandomRows | None
    full: RandomRows | None
    scored: Span
    """Rows whose log probabilities are returned."""
    max_top: int
    """Number of most probable tokens to score in each of these."""
    fixed: FixedPlan | None = None
    """The same rows and changes for a captured graph; None: the sampler launches its operations one by one."""

    @property
    def is_greedy(self) -> bool:
        """True if every row takes the most probable token of its unchanged logits."""
        return self.changes.is_empty and self.truncated is None and self.full is None

    @property
    def needs_highest_alone(self) -> bool:
        """True if no logit but the highest of each row is needed, unless tokens are masked."""
        return self.is_greedy and not self.scored


_GREEDY = SamplingPlan(NO_CHANGES, None, None, _NO_ROWS, 0)


class SamplingPlanner:
    """Planner of the sampling of steps, from the parameters and tokens of sequences."""

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        slots: CountSlots | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Make a planner. Penalties apply by counts on the device in `slots`; None: the host counts the tokens.

        If `batch_invariant`, all random rows are drawn by the kernel for truncated ones, which adds up integers.
        """
        self._random = RandomColumns(vocab_size, batch_invariant=batch_invariant)
        self._logits_processors = LogitsProcessors(eos_token_ids, vocab_size, slots)

    def plan(self, columns: BatchColumns, last_rows: LastRows, to_device: HostToDeviceBuffer) -> SamplingPlan:
        """Plan the sampling of one token per item, and add its numbers to `to_device`."""
        truncated, full = self._random.plan(columns, to_device)
        if not columns.special:
            return _GREEDY._replace(truncated=truncated, full=full) if truncated or full else _GREEDY
        changes = self._logits_processors.plan(columns, last_rows, to_device)
        num_logprobs = _num_logprobs(columns)
        scored = to_device.ints(list(num_logprobs))
        return SamplingPlan(changes, truncated, full, scored, max(num_logprobs.values(), default=0))


def _num_logprobs(columns: BatchColumns) -> dict[int, int]:
    """Return the number of log probabilities that each item asks for, if it asks for some."""
    numbers = {row: columns.sequences[row].request.params.logprobs for row in columns.special}
    return {row: number for row, number in numbers.items() if number is not None}


class Sampler:
    """Sampler on a device, by plans alone.

    A row's token depends only on the row's own logits, params, tokens and output index.
    """

    def __init__(self, counts: TokenCounts | None = None) -> None:
        self._counts = counts

    def launch(
        self,
        plan: SamplingPlan,
        logits: Tensor,
        chosen: SampledTokens | None,
        on_device: DeviceBuffer,
        to_host: DeviceToHostBuffer,
        masks: RowMasks | None = None,
    ) -> PendingTokens:
        """Launch the choice of tokens, without waiting for the device.

        Args:
            plan: plan of the rows.
            logits: [num_rows, vocab_size], any float type; not changed.
            chosen: the choice, if it was computed already, else None.
            on_device: the step's numbers.
            to_host: buffer that receives the tokens.
            masks: the tokens that constrained rows may take.
        """
        if chosen is None:
            chosen = self._choose(plan, logits, on_device, masks)
        logprobs = None
        if plan.scored:
            rows = on_device.ints(plan.scored)
            logprobs = launch_logprobs(logits[rows], chosen.tokens[rows], plan.max_top, to_host)
        pending = to_host.add(torch.stack([chosen.tokens, chosen.is_finite.long()]))
        return PendingTokens(chosen.tokens, pending, logprobs)

    def _choose(
        self, plan: SamplingPlan, logits: Tensor, on_device: DeviceBuffer, masks: RowMasks | None
    ) -> SampledTokens:
        processed = plan.changes.apply(logits.float(), on_device, self._counts)
        if masks is not None:
            # In float32 these may be the model's own logits, of which log probabilities are taken later.
            processed = processed.clone() if processed is logits else processed
            masks.apply(processed)
        sampled = sample_greedy(processed)
        if plan.full is not None:
            rows = on_device.ints(plan.full.rows)
            sampled.tokens[rows] = _draw_full(processed, rows, sampled.tokens, plan.full, on_device)
        if plan.truncated is not None:
            rows = on_device.ints(plan.truncated.rows)
            sampled.tokens[rows] = _draw_truncated(processed, rows, sampled.tokens, plan.truncated, on_device)
        return sampled


def _draw_full(logits: Tensor, rows: Tensor, peaks: Tensor, random: RandomRows, on_device: DeviceBuffer) -> Tensor:
    """Return the tokens of `rows`, [len(rows)] int64. `peaks` are the most probable tokens of these rows of logits."""
    if not has_draw_kernel(logits.device):
        return sample_full(_select(logits, rows), random.place(on_device))
    from replicas.model.sampling.triton_draw import draw_full

    tokens = torch.empty_like(rows)
    draw_full(logits, rows, on_device.floats(random.columns), peaks, tokens)
    return tokens


def _draw_truncated(logits: Tensor, rows: Tensor, peaks: Tensor, random: RandomRows, on_device: DeviceBuffer) -> Tensor:
    """Return the tokens of `rows`, [len(rows)] int64. `peaks` are the most probable tokens of these rows of logits."""
    if not has_draw_kernel(logits.device):
        return sample_truncated(_select(logits, rows), random.place(on_device))
    from replicas.model.sampling.triton_draw import draw_truncated

    columns = on_device.floats(random.columns)
    return draw_truncated(logits, rows, columns, peaks, has_top_k=random.has_top_k, has_top_p=random.has_top_p)


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of one step's rows: on the device, and on their way to the host."""

    tokens: Tensor  # [num_rows] int64, on the device
    pending: PendingTensor  # [2, num_rows] int64: the tokens, and 1 for each row of finite logits
    logprobs: PendingLogprobs | None

    def read(self, to_host: DeviceToHostBuffer, columns: BatchColumns) -> StepResults:
        """Return one result per item of the plan, after `to_host.wait()`."""
        tokens, is_finite = to_host[self.pending].numpy()
        others: dict[int, ItemResult] = {}
        if self.logprobs is not None:
            num_logprobs = _num_logprobs(columns)
            chosen = tokens[list(num_logprobs)].tolist()
            scores = self.logprobs.read(to_host, chosen, list(num_logprobs.values()))
            for row, token_id, logprobs in zip(num_logprobs, chosen, scores, strict=True):
                others[row] = ItemResult(token_id, logprobs)
        for row in (is_finite == 0).nonzero()[0].tolist():
            others[row] = ItemResult(error=_fault(columns.item(row)))
        return StepResults(tokens, others)


def _fault(item: ScheduledSequence) -> str:
    """Return the reason why a row has no finite logit."""
    constraint, params = item.sequence.constraint, item.sequence.request.params
    if constraint is None and not (params.allowed_token_ids or params.bad_words):
        return "the model's logits are not finite numbers"
    reason = None if constraint is None else constraint.error
    return reason or "no token satisfies all of grammar, allowed_token_ids, bad_words, min_tokens and stop_token_ids"
