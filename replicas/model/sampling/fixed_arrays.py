"""Sampling in fixed arrays: captured graphs read the parameters of a step's rows at fixed addresses.

Each row of the logits has its own cells in every array. A row that asks for nothing has neutral parameters, and so have
the rows of the padding: they change no logit and no count, and their token is the most probable one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span
from replicas.model.sampling.logits_processors import EntrySpans
from replicas.model.sampling.masks import RowMasks
from replicas.model.sampling.multinomial import RandomRows
from replicas.model.sampling.sampler import FixedPlan, SampledTokens, SamplingPlan, SamplingShape, sample_greedy
from replicas.model.sampling.token_counts import TokenCounts

NUM_ENTRIES = 1024
"""Most single logits of a step to which something is added, and most that are forbidden."""
_MOST_PROBABLE = (0.0, 1.0, 1.0, 0.0, 1.0)
"""Parameters of a draw from the most probable token alone, see `RandomRows.columns`."""
_NO_DRAW = (0.0,) * 5
_NO_PENALTIES = (1.0, 0.0, 0.0)


class SamplingPadding:
    """Planner of sampling in fixed arrays."""

    def __init__(self, sizes: Items[int]) -> None:
        """`sizes` are the numbers of rows to which a step's rows are padded, in order."""
        self._sizes = sizes

    def plan(
        self, plan: SamplingPlan, num_rows: int, to_device: HostToDeviceBuffer, *, has_masks: bool
    ) -> SamplingPlan:
        """Return the plan with its numbers in fixed arrays too, which are added to `to_device`.

        The step has `num_rows` rows. Return `plan` itself if they do not fit, or if a pass has made the choice already.
        """
        changes = plan.changes
        if changes.repetition is not None or (plan.is_greedy and not has_masks):
            return plan
        if any(part is not None and len(part.rows) > NUM_ENTRIES for part in (changes.added, changes.forbidden)):
            return plan
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        shape = SamplingShape(size, plan.truncated is not None, has_masks or not changes.is_empty)
        parts = [_columns(plan.full, _NO_DRAW, shape, to_device), *_changes(plan, shape, to_device)]
        if shape.is_truncated:
            parts.append(_columns(plan.truncated, _MOST_PROBABLE, shape, to_device))
        return plan._replace(fixed=FixedPlan(shape, num_rows, to_device.ints(np.concatenate(parts))))


def _columns(
    random: RandomRows | None, neutral: Items[float], shape: SamplingShape, to_device: HostToDeviceBuffer
) -> np.ndarray:
    columns = np.tile(np.array(neutral), (shape.num_cells, 1))
    if random is not None:
        columns[to_device.numbers(random.rows)] = _floats(random.columns, to_device).reshape(-1, 5)
    return _words(columns)


def _changes(plan: SamplingPlan, shape: SamplingShape, to_device: HostToDeviceBuffer) -> list[np.ndarray]:
    if not shape.has_changes:
        return []
    slots = np.zeros(shape.num_cells, np.int64)
    penalties = np.tile(np.array(_NO_PENALTIES), (shape.num_cells, 1))
    sampled = np.full((2, shape.num_cells), -1)
    if (penalized := plan.changes.penalties) is not None:
        rows = to_device.numbers(penalized.rows)
        slots[rows] = to_device.numbers(penalized.slots)
        penalties[rows] = _floats(penalized.penalties, to_device).reshape(-1, 3)
        for part, span in zip(sampled, (penalized.sampled_slots, penalized.sampled_rows), strict=True):
            part[: len(span)] = to_device.numbers(span)
    entries = [_entries(some, shape, to_device) for some in (plan.changes.added, plan.changes.forbidden)]
    return [slots, _words(penalties), sampled.ravel(), *entries]


def _entries(some: EntrySpans | None, shape: SamplingShape, to_device: HostToDeviceBuffer) -> np.ndarray:
    """Return rows, token ids and values, one after the other. Those that are not in use are of a row after the last."""
    entries = np.zeros((3, NUM_ENTRIES), np.int64)
    entries[0] = shape.num_rows
    if some is not None:
        entries[:, : len(some.rows)] = [to_device.numbers(span) for span in (some.rows, some.token_ids, some.values)]
    return entries.ravel()


def _floats(span: Span, to_device: HostToDeviceBuffer) -> np.ndarray:
    return to_device.numbers(span).view(np.float64)


def _words(floats: np.ndarray) -> np.ndarray:
    words: np.ndarray = floats.ravel().view(np.int64)
    return words


class FixedSampling:
    """Choice of tokens from parameters in fixed arrays, for logits at a fixed address.

    Invariant: a choice writes nothing but its results and the counts that the step's plan lets grow. So it can run
    before the first step, when a graph is captured.
    """

    def __init__(self, logits: Tensor, counts: TokenCounts) -> None:
        """Allocate the arrays. A step's rows are the first ones of `logits` [max_num_rows, vocab_size].

        `counts` are the sampler's.
        """
        max_rows, vocab_size = logits.shape
        self._logits = logits
        self._counts = counts
        self._rows = torch.arange(max_rows, device=logits.device)
        largest = SamplingShape(max_rows, is_truncated=True, has_changes=True)
        self._words = torch.zeros(sum(part_lengths(largest)), dtype=torch.int64, device=logits.device)
        self._last_tokens = torch.full_like(self._rows, counts.table.shape[1])
        """The tokens of the step before are at the end; before the first step, numbers that no count takes."""
        self._greedy = SampledTokens(torch.zeros_like(self._rows), torch.zeros_like(self._rows, dtype=torch.bool))
        self._bits = torch.full((max_rows, -(-vocab_size // 32) * 4), 0xFF, dtype=torch.uint8, device=logits.device)

    def load(self, plan: SamplingPlan, greedy: SampledTokens, on_device: DeviceBuffer, masks: RowMasks | None) -> None:
        """Copy a step's numbers, its greedy choice and its masks into the arrays."""
        assert plan.fixed is not None
        shape = plan.fixed.shape
        self._words[: len(plan.fixed.words)].copy_(on_device.ints(plan.fixed.words))
        if not shape.has_changes:
            kept = self._greedy.first(plan.fixed.num_rows)
            kept.tokens.copy_(greedy.tokens)
            kept.is_finite.copy_(greedy.is_finite)
            return
        if plan.changes.penalties is not None:
            self._counts.grow_by_known(plan.changes.penalties, on_device)
            if plan.changes.penalties.sampled_slots:
                self._last_tokens[-len(on_device.last_tokens) :].copy_(on_device.last_tokens)
        self._bits[: shape.num_rows].fill_(0xFF)
        if masks is not None:
            # Rows of the head beyond the vocabulary are no tokens.
            missing = self._bits.shape[1] - masks.bits.shape[1]
            self._bits.index_copy_(0, masks.rows, pad(masks.bits, (0, missing)))

    def choose(self, shape: SamplingShape) -> SampledTokens:
        """Return the tokens of the first rows of the logits. The operations are those that a graph captures."""
        from replicas.model.sampling.triton_draw import draw_full, draw_truncated  # Only CUDA's torch has Triton.

        parts = torch.split(self._words[: sum(part_lengths(shape))], list(part_lengths(shape)))
        rows, logits = self._rows[: shape.num_rows], self._logits[: shape.num_rows]
        chosen = self._greedy.first(len(rows))
        if shape.has_changes:
            logits = self._changed(logits, rows, parts[1:7])
            chosen = sample_greedy(logits)
        peaks = chosen.tokens
        full, truncated = (part[: 5 * len(rows)].view(torch.float64) for part in (parts[0], parts[7]))
        if shape.is_truncated:
            tokens = draw_truncated(logits.float(), rows, truncated, peaks, has_top_k=True, has_top_p=True)
        else:
            tokens = peaks.clone()
        draw_full(logits, rows, full, peaks, tokens)
        return SampledTokens(tokens, chosen.is_finite)

    def _changed(self, logits: Tensor, rows: Tensor, parts: Items[Tensor]) -> Tensor:
        """Return a changed copy of the logits, in the order of `LogitsChanges`, float32."""
        from replicas.model.sampling.triton_penalties import mask

        slots, penalties, sampled_slots, sampled_rows, added, forbidden = parts
        # The last row takes the entries that are not in use.
        changed = torch.empty(len(rows) + 1, logits.shape[1], dtype=torch.float32, device=logits.device)
        changed[:-1].copy_(logits)
        self._counts.grow_by_sampled(sampled_slots, self._last_tokens[sampled_rows])
        numbers = penalties[: 3 * len(rows)].view(torch.float64).view(-1, 3)
        self._counts.penalize(changed, rows, slots[: len(rows)], numbers, self._counts.table)
        entry_rows, ids, values = added.view(3, -1)
        changed[entry_rows, ids] += values.view(torch.float64).float()
        entry_rows, ids, values = forbidden.view(3, -1)
        changed[entry_rows, ids] = values.view(torch.float64).float()
        mask(changed[:-1], self._bits[: len(rows)])
        return changed[:-1]


def part_lengths(shape: SamplingShape) -> tuple[int, ...]:
    """Return the number of words of each part of the arrays.

    The parts are parameters of draws from all tokens; slots of counts, penalties, first cells and rows of tokens that
    only the device knows, added entries and forbidden ones; parameters of other draws.
    """
    columns = 5 * shape.num_cells
    cells, entries = shape.num_cells * shape.has_changes, 3 * NUM_ENTRIES * shape.has_changes
    return (columns, cells, 3 * cells, cells, cells, entries, entries, columns * shape.is_truncated)
