"""When a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.engine.sequence import Sequence
from replicas.protocol import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ends here; `cause` is the stop token id or stop string, None for EOS and length."""

    reason: FinishReason
    cause: int | str | None = None


def stop_token(sequence: Sequence, eos_token_ids: frozenset[int]) -> Stop | None:
    """Whether the newest output token is one that ends the sequence."""
    params, token_id = sequence.request.params, sequence.token_ids[-1]
    if sequence.num_output_tokens <= params.min_tokens:
        return None
    if token_id in params.stop_token_ids:
        return Stop(FinishReason.STOP, token_id)
    if token_id in eos_token_ids and not params.ignore_eos:
        return Stop(FinishReason.STOP)
    return None


def may_stop_on_text(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether a stop string that the newest of so many output tokens completes ends the sequence."""
    return num_output_tokens > params.min_tokens


def length_reached(sequence: Sequence) -> Stop | None:
    """Whether the sequence has all the output tokens it may have."""
    return None if sequence.can_sample else Stop(FinishReason.LENGTH)
