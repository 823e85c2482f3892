"""Changes that sampling parameters make to logits before a token is drawn, touching only the tokens concerned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replicas.engine.sequence import Sequence


@dataclass(slots=True)
class _Entries:
    """Single logits, and a number for each."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token_ids: Items[int], values: Items[float]) -> None:
        self.rows.extend([row] * len(token_ids))
        self.token_ids.extend(token_ids)
        self.values.extend(values)

    def place(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Index (rows, token ids), each [num_entries] int64, and values [num_entries] float32."""
        index = torch.tensor([self.rows, self.token_ids], dtype=torch.int64).to(device, non_blocking=True)
        values = torch.tensor(self.values, dtype=torch.float32).to(device, non_blocking=True)
        return (index[0], index[1]), values


class LogitEdits:
    """The edits of one step's rows, in the order in which they apply.

    1. Repetition: logits of tokens in prompt or output are divided (if positive) or multiplied by the penalty.
    2. Presence and frequency: subtracted for tokens in the output, once and per occurrence.
    3. Logit bias: added.
    4. Stop tokens cannot be drawn before `min_tokens`.
    """

    def __init__(self, sequences: Items[Sequence], eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._repetition = _Entries()
        self._added = _Entries()
        self._forbidden = _Entries()
        for row, sequence in enumerate(sequences):
            self._penalize_repetition(row, sequence)
            self._add_offsets(row, sequence)
            self._forbid_stops(row, sequence, eos_token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether no logit changes."""
        return not (self._repetition.rows or self._added.rows or self._forbidden.rows)

    def apply(self, logits: Tensor) -> Tensor:
        """A changed copy of `logits` [num_rows, vocab_size] float32, or `logits` itself where nothing changes."""
        if self.is_empty:
            return logits
        logits = logits.clone()
        if self._repetition.rows:
            index, penalty = self._repetition.place(logits.device)
            before = logits[index]
            logits[index] = torch.where(before > 0, before / penalty, before * penalty)
        if self._added.rows:
            index, values = self._added.place(logits.device)
            logits.index_put_(index, values, accumulate=True)
        if self._forbidden.rows:
            index, values = self._forbidden.place(logits.device)
            logits[index] = values
        return logits

    def _penalize_repetition(self, row: int, sequence: Sequence) -> None:
        penalty = sequence.request.params.repetition_penalty
        if penalty != 1.0:
            seen = self._known(set(sequence.token_ids))
            self._repetition.add(row, seen, [penalty] * len(seen))

    def _add_offsets(self, row: int, sequence: Sequence) -> None:
        """One entry per token, so that sums do not depend on the order in which a device adds."""
        params = sequence.request.params
        offsets: dict[int, float] = defaultdict(float)
        if params.presence_penalty or params.frequency_penalty:
            for token_id, count in Counter(sequence.token_ids[sequence.num_prompt_tokens :]).items():
                offsets[token_id] = -params.presence_penalty - params.frequency_penalty * count
        for entry in params.logit_bias:
            offsets[entry.token_id] += entry.bias
        token_ids = self._known(offsets)
        self._added.add(row, token_ids, [offsets[token_id] for token_id in token_ids])

    def _forbid_stops(self, row: int, sequence: Sequence, eos_token_ids: frozenset[int]) -> None:
        params = sequence.request.params
        if sequence.num_output_tokens >= params.min_tokens:
            return
        stops = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        token_ids = self._known(stops)
        self._forbidden.add(row, token_ids, [float("-inf")] * len(token_ids))

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        """Those that the model has a logit for."""
        return [token_id for token_id in token_ids if token_id < self._vocab_size]
