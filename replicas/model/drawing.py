"""Drawing one token per row from its distribution, with one uniform number per row.

Every row is computed on its own, in the same way whatever other rows are there. Weights are
exp((logit - largest logit) / temperature), so the likeliest token weighs 1; sums are float64. The uniform number is
a function of the request's seed and the token's index: the same on every device, in every batch, after any preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.transfers import Outbox, Placed, Span
from replicas.protocol import SamplingParams

# On CPU, sorting the whole vocabulary costs 30 times as much as finding the 256 likeliest tokens, which nearly always
# hold everything that top-k, top-p or min-p keep. Rows for which they do not try again with more, and at last with all.
# Elsewhere all are sorted at once: to look whether they do, the host would have to wait for the device.
_NUM_CANDIDATES = (256, 8192)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BITS = 52  # So that uniform * total < total holds in float64, rounding included.


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters of the rows to draw for, tensors [num_rows, 1] float64."""

    uniform: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    """Infinite where a row sets none."""
    needs_total: bool
    """Whether some row's top-p is a share of the whole vocabulary."""

    def select(self, rows: Tensor) -> Draws:
        """The parameters of `rows` [n] int64."""
        return Draws(
            self.uniform[rows],
            self.temperature[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.top_k[rows],
            self.needs_total,
        )


@dataclass(frozen=True, slots=True)
class SentDraws:
    """Parameters of the rows to draw for, on their way to the device."""

    rows: Span
    """[num_rows] which rows they are."""
    columns: Span
    """[5 * num_rows]: uniform, temperature, top-p, min-p and top-k of each row."""
    needs_total: bool

    def place(self, placed: Placed) -> Draws:
        """The parameters on the device."""
        columns = placed.floats(self.columns).view(len(self.rows), 5, 1)
        uniform, temperature, top_p, min_p, top_k = columns.unbind(dim=1)
        return Draws(uniform, temperature, top_p, min_p, top_k, self.needs_total)


def send_draws(
    rows: Items[int], params: Items[SamplingParams], uniforms: Items[float], vocab_size: int, outbox: Outbox
) -> SentDraws:
    """Send what it takes to draw for `rows`, whose params and uniform numbers are given in the same order."""
    numbers: list[float] = []
    for row, uniform in zip(params, uniforms, strict=True):
        numbers += (uniform, row.temperature, row.top_p, row.min_p, _top_k(row, vocab_size))
    needs_total = any(row.top_p < 1.0 and not _is_restricted(row, vocab_size) for row in params)
    return SentDraws(outbox.ints(rows), outbox.floats(numbers), needs_total)


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) that chooses output token `index` of a request with `seed`."""
    return (_mix(_mix(seed & _MASK) + (index + 1) * _GOLDEN) >> (64 - _BITS)) / (1 << _BITS)


def _mix(value: int) -> int:
    """SplitMix64's output function: a bijection of 64-bit integers in which every input bit moves every output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens are left out before drawing."""
    return params.top_p < 1.0 or _is_restricted(params, vocab_size)


def _is_restricted(params: SamplingParams, vocab_size: int) -> bool:
    """Whether tokens are left out before top-p is applied."""
    return params.min_p > 0.0 or _top_k(params, vocab_size) < math.inf


def _top_k(params: SamplingParams, vocab_size: int) -> float:
    return math.inf if params.top_k is None or params.top_k >= vocab_size else params.top_k


def draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """Token ids [num_rows] drawn from the whole distributions of logits [num_rows, vocab_size] float32."""
    peak = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp((logits - peak) / draws.temperature.float())
    return _invert(weights.cumsum(dim=-1, dtype=torch.float64), draws.uniform)


def draw_from_kept(logits: Tensor, draws: Draws) -> Tensor:
    """Token ids [num_rows] drawn from what min-p, top-k, then top-p keep of logits [num_rows, vocab_size] float32."""
    total = _total_weights(logits, draws)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    rows, remaining = torch.arange(logits.shape[0], device=logits.device), logits
    for num_candidates in (*(_NUM_CANDIDATES if logits.device.type == "cpu" else ()), logits.shape[1]):
        values, token_ids = _likeliest(remaining, min(num_candidates, logits.shape[1]))
        tokens[rows], fits = _draw_from_sorted(values, token_ids, total[rows], draws.select(rows))
        if num_candidates >= logits.shape[1] or bool(fits.all()):
            break
        rows = rows[~fits]
        remaining = logits[rows]
    return tokens


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits and their ids [num_rows, count]; largest first, equal ones by id."""
    if count == logits.shape[1]:
        values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, token_ids
    token_ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _total_weights(logits: Tensor, draws: Draws) -> Tensor:
    """Weight of the whole vocabulary, [num_rows, 1] float64; zeros where no row needs it."""
    if not draws.needs_total:
        return torch.zeros_like(draws.uniform)
    peak = logits.amax(dim=-1, keepdim=True)
    return torch.exp((logits - peak) / draws.temperature.float()).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _draw_from_sorted(values: Tensor, token_ids: Tensor, total: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw among the likeliest tokens of each row.

    Args:
        values: [num_rows, count] float32, largest first.
        token_ids: [num_rows, count]
        total: [num_rows, 1] float64, weight of the whole vocabulary.
        draws: the rows' parameters.

    Returns:
        Token ids [num_rows], and whether all that the row keeps was certainly among its `count` tokens.
    """
    weights = torch.exp((values - values[:, :1]).double() / draws.temperature)
    rank = torch.arange(values.shape[1], device=values.device)
    eligible = (weights >= draws.min_p) & (rank < draws.top_k)
    weights = weights * eligible
    cumulative = weights.cumsum(dim=-1)
    # top-p is a share of what min-p and top-k left.
    is_restricted = (draws.min_p > 0) | (draws.top_k < math.inf)
    left = torch.where(is_restricted, cumulative[:, -1:], total)
    kept = eligible & (cumulative - weights < draws.top_p * left)
    # Tokens as likely as the last may be missing, and which of them are here is the device's choice.
    is_last = values == values[:, -1:]
    fits = ~(is_last & torch.where(is_restricted, eligible, kept)).any(dim=-1)
    index = _invert((weights * kept).cumsum(dim=-1), draws.uniform)
    return token_ids.gather(1, index[:, None])[:, 0], fits


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Index [num_rows] of the first entry of [num_rows, count] that exceeds its row's share `uniform` of the last."""
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    # Rows that are not numbers are refused elsewhere; their index must merely exist.
    return index.clamp(max=cumulative.shape[1] - 1)
