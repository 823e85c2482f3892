"""Multinomial sampling: draws one token per row from the row's distribution, with one uniform number per row.

A row's result does not depend on the other rows. The weight of a token is exp((logit - largest logit) / temperature),
so the most probable token has weight 1. Sums of weights are float64. The uniform number is a function of the request's
seed and the output token's index, so it is the same on every device, in every batch and after any preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from replicas.engine.batch import BatchColumns
from replicas.model.batch.inputs import ColumnOwners
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span
from replicas.protocol import SamplingParams

# Numbers of most probable tokens to try on CPU, before all. Sorting the whole vocabulary takes 30 times as long as
# finding the 256 most probable tokens, and these nearly always include all that top-k, top-p or min-p keep. Rows for
# which they do not are tried again with more tokens. On a GPU without Triton all tokens are sorted at once: the check
# would wait for the device.
_NUM_CANDIDATES = (256, 8192)

_LARGEST_PART = 256
"""Most tokens whose weights are added up together, before the sums are: a power of 2."""

_SMALLEST_EXPONENT = -80.0
"""Exponents up to this one give a weight of 0: 150,000 such weights are nothing beside the largest one, which is 1."""

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Lower temperatures are greedy: other tokens would have weight 0 in float32, or the division would overflow.
GREEDY_TEMPERATURE = 1e-5
# Numbers of a row that draws randomly, in the order of `RandomRows.columns`.
_UNIFORM, _TEMPERATURE, _TOP_P, _MIN_P, _TOP_K = range(5)
_BITS = 52  # With 52 bits, uniform * total < total holds in float64 despite rounding.


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of the rows that draw randomly, as tensors [num_rows, 1] float64."""

    uniform: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    """Infinite for a row without top-k."""
    needs_total: bool
    """True if some row's top-p is a share of the whole vocabulary's weight."""

    def select(self, rows: Tensor) -> SamplingTensors:
        """Return the parameters of `rows` [n] int64."""
        return SamplingTensors(
            self.uniform[rows],
            self.temperature[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.top_k[rows],
            self.needs_total,
        )


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that draw randomly, with their parameters, in a step's numbers."""

    rows: Span  # [num_rows]: the rows of the logits that draw randomly
    columns: Span  # [5 * num_rows]: uniform, temperature, top-p, min-p and top-k of each row
    needs_total: bool
    has_top_k: bool
    """True if some row has a top-k that can exclude tokens."""
    has_top_p: bool
    """True if some row has a top-p below 1."""

    def place(self, on_device: DeviceBuffer) -> SamplingTensors:
        """Return the parameters as tensors on the device."""
        columns = on_device.floats(self.columns).view(len(self.rows), 5, 1)
        uniform, temperature, top_p, min_p, top_k = columns.unbind(dim=1)
        return SamplingTensors(uniform, temperature, top_p, min_p, top_k, self.needs_total)


class RandomColumns:
    """Parameters of the random sampling of sequences, in arrays by their columns in the engine's table."""

    def __init__(self, vocab_size: int, *, batch_invariant: bool) -> None:
        """If `batch_invariant`, all random rows count as truncated."""
        self._vocab_size = vocab_size
        self._batch_invariant = batch_invariant
        self._owners = ColumnOwners()
        self._seeds = np.zeros(0, np.uint64)
        self._num_prompt_tokens = np.zeros(0, np.int64)
        self._numbers = np.zeros((0, _TOP_K + 1))
        self._is_random = np.zeros(0, bool)
        self._is_truncated = np.zeros(0, bool)
        self._needs_total = np.zeros(0, bool)
        """True if top-p is a share of the whole vocabulary's weight."""
        self._draws: tuple[np.ndarray | None, _Draws | None, _Draws | None] = None, None, None
        """Columns of the last step's items, and their draws: those of truncated rows, and the others."""

    def plan(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> tuple[RandomRows | None, RandomRows | None]:
        """Add the numbers of the items, all of which sample, to `to_device`; return the truncated rows and the others.

        Truncated rows are those from which top-p, min-p or top-k can exclude tokens.
        """
        rows = columns.rows
        if rows is not self._draws[0]:
            if len(newcomers := self._owners.newcomers(columns)):
                self._enter(columns, newcomers.tolist())
            is_random, is_truncated = self._is_random[rows], self._is_truncated[rows]
            chosen = is_random & is_truncated, is_random & ~is_truncated
            truncated, full = (self._draws_of(are.nonzero()[0], rows) for are in chosen)
            self._draws = rows, truncated, full
        _, truncated, full = self._draws
        return (
            None if truncated is None else truncated.plan(columns, to_device),
            None if full is None else full.plan(columns, to_device),
        )

    def _enter(self, columns: BatchColumns, indices: Items[int]) -> None:
        """Read the parameters of the items at `indices`, whose sequences have come to their columns."""
        if (num_rows := int(columns.rows.max()) + 1) > len(self._seeds):
            for name, column in list(vars(self).items()):
                if isinstance(column, np.ndarray):
                    setattr(self, name, np.resize(column, (num_rows, *column.shape[1:])))
        for index in indices:
            row, sequence = columns.rows.item(index), columns.sequences[index]
            params = sequence.request.params
            top_k = _top_k(params, self._vocab_size)
            is_restricted = params.min_p > 0.0 or top_k < math.inf
            self._seeds[row], self._num_prompt_tokens[row] = params.seed & _MASK, sequence.num_prompt_tokens
            self._numbers[row] = (0.0, params.temperature, params.top_p, params.min_p, top_k)
            self._is_random[row] = params.temperature >= GREEDY_TEMPERATURE
            self._is_truncated[row] = self._batch_invariant or params.top_p < 1.0 or is_restricted
            self._needs_total[row] = params.top_p < 1.0 and not is_restricted

    def _draws_of(self, indices: np.ndarray, rows: np.ndarray) -> _Draws | None:
        if not len(indices):
            return None
        rows = rows[indices]
        numbers = self._numbers[rows]
        return _Draws(
            indices,
            self._seeds[rows],
            self._num_prompt_tokens[rows],
            numbers,
            needs_total=bool(self._needs_total[rows].any()),
            has_top_k=bool((numbers[:, _TOP_K] < math.inf).any()),
            has_top_p=bool((numbers[:, _TOP_P] < 1.0).any()),
        )


@dataclass(frozen=True, slots=True)
class _Draws:
    """Rows of the logits that draw randomly, for steps of the same sequences: only the uniform numbers change."""

    indices: np.ndarray
    seeds: np.ndarray
    num_prompt_tokens: np.ndarray
    numbers: np.ndarray
    """[num_rows, 5]: see `RandomRows.columns`."""
    needs_total: bool
    has_top_k: bool
    has_top_p: bool

    def plan(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> RandomRows:
        """Add the numbers of one step to `to_device`."""
        self.numbers[:, _UNIFORM] = uniforms(self.seeds, columns.ends[self.indices] - self.num_prompt_tokens)
        return RandomRows(
            to_device.ints(self.indices),
            to_device.floats(self.numbers.ravel()),
            self.needs_total,
            has_top_k=self.has_top_k,
            has_top_p=self.has_top_p,
        )


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the uniform numbers in [0, 1) that choose output tokens `indices` of requests with `seeds` uint64."""
    mixed = _mix(_mix(seeds) + (indices + 1).astype(np.uint64) * _GOLDEN)
    numbers: np.ndarray = (mixed >> np.uint64(64 - _BITS)).astype(np.float64) / (1 << _BITS)
    return numbers


def _mix(values: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for `values`: a 64-bit bijection in which every input bit affects every output bit."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _top_k(params: SamplingParams, vocab_size: int) -> float:
    return math.inf if params.top_k is None or params.top_k >= vocab_size else params.top_k


def sample_full(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return token ids [num_rows], drawn from the whole distributions of logits [num_rows, vocab_size] float32."""
    return _draw(_weights(logits, sampling), sampling.uniform)


def sample_truncated(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return token ids [num_rows], drawn from the tokens that min-p, top-k and then top-p keep.

    `logits` is [num_rows, vocab_size] float32.
    """
    num_rows, vocab_size = logits.shape
    total = _total_weights(logits, sampling)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    rows, remaining = torch.arange(num_rows, device=logits.device), logits
    tries = (*_NUM_CANDIDATES, vocab_size) if logits.device.type == "cpu" else (vocab_size,)
    for num_candidates in tries:
        values, token_ids = _top_candidates(remaining, min(num_candidates, vocab_size))
        tokens[rows], fits = _sample_sorted(values, token_ids, total[rows], sampling.select(rows))
        if num_candidates >= vocab_size or bool(fits.all()):
            break
        rows = rows[~fits]
        remaining = logits[rows]
    return tokens


def _top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits and their ids, each [num_rows, count]; largest first, equal ones by id."""
    if count == logits.shape[1]:
        values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, token_ids
    token_ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _total_weights(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the weight of the whole vocabulary, [num_rows, 1] float64; zeros if no row needs it."""
    if not sampling.needs_total:
        return torch.zeros_like(sampling.uniform)
    return _weights(logits, sampling).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _weights(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the tokens' weights, [num_rows, vocab_size] float32."""
    peak = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - peak).div_(sampling.temperature.float())
    if scaled.device.type != "cpu":
        return scaled.exp_()
    # Beyond this range, to which every forbidden token belongs, `exp` is three times as slow. A weight is 0 there.
    return torch.threshold_(scaled.clamp_(min=_SMALLEST_EXPONENT - 1).exp_(), math.exp(_SMALLEST_EXPONENT), 0.0)


def _sample_sorted(
    values: Tensor, token_ids: Tensor, total: Tensor, sampling: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """Draw from the most probable tokens of each row.

    Args:
        values: [num_rows, count] float32, largest first.
        token_ids: [num_rows, count]
        total: [num_rows, 1] float64, weight of the whole vocabulary.
        sampling: parameters of the rows.

    Returns:
        Token ids [num_rows], and [num_rows] bool: True if the `count` tokens certainly include all that the row keeps.
    """
    weights = torch.exp((values - values[:, :1]).double() / sampling.temperature)
    rank = torch.arange(values.shape[1], device=values.device)
    # Forbidden tokens have weight 0. If one is among the candidates, all tokens that are allowed are, too.
    eligible = (weights > 0) & (weights >= sampling.min_p) & (rank < sampling.top_k)
    weights = weights * eligible
    cumulative = weights.cumsum(dim=-1)
    # top-p is a share of the weight that min-p and top-k left.
    is_restricted = (sampling.min_p > 0) | (sampling.top_k < math.inf)
    left = torch.where(is_restricted, cumulative[:, -1:], total)
    nucleus = eligible & (cumulative - weights < sampling.top_p * left)
    # Some tokens as likely as the last one may be missing; the device chooses which of them are here.
    is_last = values == values[:, -1:]
    fits = ~(is_last & torch.where(is_restricted, eligible, nucleus)).any(dim=-1)
    index = _invert((weights * nucleus).cumsum(dim=-1), sampling.uniform)
    return token_ids.gather(1, index[:, None])[:, 0], fits


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the first token at which the row's weights add up to more than `uniform` times their total.

    Cumulative sums of the whole vocabulary would be twice as large as the logits, and take longer to write than to
    compute. So the row's parts are added up first, and then the tokens of the part in which the sum is reached.

    Args:
        weights: [num_rows, vocab_size] float32.
        uniform: [num_rows, 1] float64.

    Returns:
        Token ids [num_rows]; the weight of each is positive, unless its row has NaN.
    """
    num_rows, vocab_size = weights.shape
    part_size = max(64, min(_LARGEST_PART, vocab_size & -vocab_size))
    missing = -vocab_size % part_size  # Mostly none: padding copies.
    parts = (functional.pad(weights, (0, missing)) if missing else weights).view(num_rows, -1, part_size)
    cumulative = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform * cumulative[:, -1:]
    part = _first_above(cumulative, threshold)
    before = functional.pad(cumulative, (1, 0)).gather(1, part)
    inside = parts[torch.arange(num_rows, device=weights.device), part[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # Both sums of a part are rounded, and may differ: the threshold must lie below the one that is searched.
    highest = torch.nextafter(inside[:, -1:], torch.zeros_like(threshold))
    token = part * part_size + _first_above(inside, torch.minimum((threshold - before).clamp(min=0.0), highest))
    return token[:, 0].clamp(max=vocab_size - 1)


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the index of the first entry above `uniform` times the row's last entry, [num_rows].

    `cumulative` is [num_rows, count], `uniform` is [num_rows, 1].
    """
    return _first_above(cumulative, uniform * cumulative[:, -1:])[:, 0]


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the index of each row's first entry of `cumulative` [num_rows, count] above `threshold`, [num_rows, 1]."""
    index = torch.searchsorted(cumulative, threshold, right=True)
    # Rows with NaN fail elsewhere. Their index only has to be valid.
    return index.clamp(max=cumulative.shape[1] - 1)
