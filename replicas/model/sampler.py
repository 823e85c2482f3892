"""From logits to the next token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledSequence
from replicas.model.drawing import SentDraws, draw_from_all, draw_from_kept, is_truncated, send_draws, uniform
from replicas.model.logit_edits import LogitEdits
from replicas.model.logprobs import LaunchedLogprobs, launch_logprobs
from replicas.model.transfers import Inbox, Letter, Outbox, Placed
from replicas.protocol import SamplingParams

# Below this temperature every token but the likeliest has weight 0 in float32, or the division overflows.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Choice:
    """One token per row, on the device."""

    tokens: Tensor
    """[num_rows] int64"""
    is_sound: Tensor
    """[num_rows] bool: whether the row's logits are numbers; elsewhere the token is any that exists."""


def likeliest(logits: Tensor) -> Choice:
    """The greedy choice from logits [num_rows, vocab_size] float32."""
    tokens = logits.argmax(dim=-1)
    # argmax finds a NaN before any number, so that the value found shows whether the row is sound.
    return Choice(tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite())


class Sampler:
    """Chooses tokens as the sequences' params say.

    A row's token depends on its own logits, params, tokens and output index only, never on the other rows.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def plan(self, items: Items[ScheduledSequence], vocab_size: int, outbox: Outbox) -> SamplingPlan:
        """Plan the tokens that `items` sample, one per row of logits; what the device must know goes to `outbox`."""
        edits = LogitEdits(items, self._eos_token_ids, vocab_size, outbox)
        return SamplingPlan(items, edits, vocab_size, outbox)


class SamplingPlan:
    """How the tokens of one step are chosen."""

    def __init__(self, items: Items[ScheduledSequence], edits: LogitEdits, vocab_size: int, outbox: Outbox) -> None:
        self._edits = edits
        self._params = [item.sequence.request.params for item in items]
        random = [row for row, params in enumerate(self._params) if params.temperature >= _GREEDY_TEMPERATURE]
        self._kept, self._all = (
            self._send([row for row in random if is_truncated(self._params[row], vocab_size) is is_kept], items,
                       vocab_size, outbox)
            for is_kept in (True, False)
        )  # fmt: skip
        self._scored = [row for row, params in enumerate(self._params) if params.logprobs is not None]
        self._scored_span = outbox.ints(self._scored) if self._scored else None

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the likeliest token of its logits as they are."""
        return self._edits.is_empty and self._kept is None and self._all is None

    def launch(self, logits: Tensor, greedy: Choice | None, placed: Placed, inbox: Inbox) -> LaunchedTokens:
        """Choose, without waiting for anything.

        Args:
            logits: [num_rows, vocab_size], any float type; not changed.
            greedy: the greedy choice, where it is known already.
            placed: what the plan sent.
            inbox: where the tokens arrive.
        """
        if greedy is None or not self.is_greedy:
            greedy = self._choose(logits, placed)
        logprobs = None
        if self._scored_span is not None:
            logprobs = self._score(logits, greedy.tokens, placed.ints(self._scored_span), inbox)
        arriving = inbox.add(torch.stack([greedy.tokens, greedy.is_sound.long()]))
        return LaunchedTokens(greedy.tokens, arriving, self._params, self._scored, logprobs)

    def _choose(self, logits: Tensor, placed: Placed) -> Choice:
        edited = self._edits.apply(logits.float(), placed)
        choice = likeliest(edited)
        for draws, draw in ((self._all, draw_from_all), (self._kept, draw_from_kept)):
            if draws is not None:
                rows = placed.ints(draws.rows)
                some = edited if len(rows) == len(edited) else edited[rows]
                choice.tokens[rows] = draw(some, draws.place(placed))
        return choice

    def _score(self, logits: Tensor, tokens: Tensor, rows: Tensor, inbox: Inbox) -> LaunchedLogprobs:
        most_top = max(self._params[row].logprobs or 0 for row in self._scored)
        return launch_logprobs(logits[rows], tokens[rows], most_top, inbox)

    def _send(
        self, rows: list[int], items: Items[ScheduledSequence], vocab_size: int, outbox: Outbox
    ) -> SentDraws | None:
        if not rows:
            return None
        params = [self._params[row] for row in rows]
        uniforms = [uniform(row.seed, items[number].output_index) for number, row in zip(rows, params, strict=True)]
        return send_draws(rows, params, uniforms, vocab_size, outbox)


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """The tokens of one step's rows: on the device now, on the host once they have arrived."""

    tokens: Tensor
    """[num_rows] int64, on the device"""
    _arriving: Letter
    _params: list[SamplingParams]
    _scored: list[int]
    _logprobs: LaunchedLogprobs | None

    def read(self, inbox: Inbox) -> list[ItemResult]:
        """One result per row, once the inbox is complete."""
        tokens, sound = inbox[self._arriving].tolist()
        results = [
            ItemResult(token_id=token) if is_sound else ItemResult(error="the model's logits are not finite numbers")
            for token, is_sound in zip(tokens, sound, strict=True)
        ]
        if self._logprobs is not None:
            chosen = [tokens[row] for row in self._scored]
            wanted = [self._params[row].logprobs or 0 for row in self._scored]
            for row, logprobs in zip(self._scored, self._logprobs.read(inbox, chosen, wanted), strict=True):
                if sound[row]:
                    results[row] = ItemResult(token_id=tokens[row], logprobs=logprobs)
        return results
