"""From logits to the next token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult
from replicas.engine.sequence import Sequence
from replicas.model.drawing import build_draws, draw_from_all, draw_from_kept, is_truncated
from replicas.model.logit_edits import LogitEdits
from replicas.model.logprobs import position_logprobs
from replicas.model.random_numbers import uniform
from replicas.protocol import SamplingParams

# Below this temperature every token but the likeliest has weight 0 in float32, or the division overflows.
_GREEDY_TEMPERATURE = 1e-5


class Sampler:
    """Chooses tokens as the sequences' params say.

    A row's token depends on its own logits, params, tokens and output index only, never on the other rows.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, sequences: Items[Sequence]) -> list[ItemResult]:
        """The next token of each sequence, with the log probabilities it asks for.

        Args:
            logits: [num_sequences, vocab_size], any float type; not changed.
            sequences: one per row.
        """
        params = [sequence.request.params for sequence in sequences]
        vocab_size = logits.shape[1]
        edited = LogitEdits(sequences, self._eos_token_ids, vocab_size).apply(logits.float())
        tokens = edited.argmax(dim=-1)
        # argmax finds a NaN before any number, so that the value found shows whether the row is sound.
        is_sound = edited.gather(1, tokens[:, None])[:, 0].isfinite()
        random_rows = [row for row, row_params in enumerate(params) if row_params.temperature >= _GREEDY_TEMPERATURE]
        for is_kind_truncated in (False, True):
            rows = [row for row in random_rows if is_truncated(params[row], vocab_size) is is_kind_truncated]
            if rows:
                drawn = _draw(edited, rows, sequences, is_kind_truncated)
                tokens[torch.tensor(rows, device=tokens.device)] = drawn
        chosen, sound = torch.stack([tokens, is_sound.long()]).tolist()
        return _results(logits, params, chosen, sound)


def _draw(logits: Tensor, rows: list[int], sequences: Items[Sequence], is_kind_truncated: bool) -> Tensor:
    """Token ids [len(rows)] drawn for `rows` of logits [num_sequences, vocab_size] float32."""
    drawing = [sequences[row] for row in rows]
    draws = build_draws(
        [sequence.request.params for sequence in drawing],
        [uniform(sequence.request.params.seed, sequence.num_output_tokens) for sequence in drawing],
        logits.shape[1],
        logits.device,
    )
    if len(rows) < len(sequences):
        logits = logits[torch.tensor(rows, device=logits.device)]
    return draw_from_kept(logits, draws) if is_kind_truncated else draw_from_all(logits, draws)


def _results(logits: Tensor, params: list[SamplingParams], tokens: list[int], is_sound: list[int]) -> list[ItemResult]:
    results = [
        ItemResult(token_id=token) if sound else ItemResult(error="the model's logits are not finite numbers")
        for token, sound in zip(tokens, is_sound, strict=True)
    ]
    rows = [row for row, sound in enumerate(is_sound) if sound and params[row].logprobs is not None]
    if rows:
        wanted = [params[row].logprobs or 0 for row in rows]
        chosen = logits[torch.tensor(rows, device=logits.device)]
        logprobs = position_logprobs(chosen, [tokens[row] for row in rows], wanted)
        for row, logprob in zip(rows, logprobs, strict=True):
            results[row] = ItemResult(token_id=tokens[row], logprobs=logprob)
    return results
