"""Output processor: turns step results into a sequence's deltas, and decides the end of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from replicas.engine.batch import ItemResult, ScheduledSequence
from replicas.engine.detokenizer import Detokenizer
from replicas.engine.interfaces import IncrementalDecoder
from replicas.engine.sequence import Sequence
from replicas.errors import SequenceFailed, ServingError
from replicas.protocol import FinishReason, GenerateRequest, PositionLogprobs, SamplingParams, TokenDelta, Usage

DecoderFactory = Callable[[GenerateRequest], IncrementalDecoder]


@dataclass(frozen=True, slots=True)
class Stop:
    """End of a sequence; `cause` is the stop token id or stop string, None for EOS and length."""

    reason: FinishReason
    cause: int | str | None = None


class OutputProcessor:
    """Output processor of one sequence: turns the results of steps into deltas, and decides the sequence's end."""

    def __init__(self, sequence: Sequence, decoders: DecoderFactory, eos_token_ids: frozenset[int]) -> None:
        """Decode the output that the request brings from other replicas.

        Raises:
            SequenceFailed: that output cannot be decoded.
        """
        self.sequence = sequence
        self._eos_token_ids = eos_token_ids
        request = sequence.request
        try:
            self._detokenizer = Detokenizer(decoders(request), request.params.stop)
            for index, token_id in enumerate(request.output_token_ids):
                # The reader has this text already. Text that was held back is held back again.
                self._detokenizer.push(token_id, _may_stop_on_text(request.params, index + 1))
        except Exception as error:  # A tokenizer may raise anything; only this request fails.
            raise _undecodable(error) from error

    def advance(self, item: ScheduledSequence, result: ItemResult) -> TokenDelta | None:
        """Add a step's result for the sequence; return its delta, or None if there is nothing to show yet."""
        sequence = self.sequence
        prompt_logprobs = sequence.take_prompt_logprobs(item.start, result.prompt_logprobs)
        if not item.samples:
            is_scored = not sequence.can_sample and sequence.num_computed_tokens == sequence.num_tokens
            stop = Stop(FinishReason.LENGTH) if is_scored else None
            has_output = is_scored or prompt_logprobs
            return self._delta((), "", stop, prompt_logprobs=prompt_logprobs) if has_output else None
        assert result.token_id is not None
        sequence.append(result.token_id)
        try:
            text, stop = self._read(result.token_id)
        except Exception as error:  # A tokenizer may raise anything; only this sequence fails.
            sequence.undo_append()
            return self.fail(_undecodable(error))
        logprobs = () if result.logprobs is None else (result.logprobs,)
        return self._delta((result.token_id,), text, stop, logprobs, prompt_logprobs)

    def fail(self, error: ServingError) -> TokenDelta:
        """Return the last delta of a sequence that cannot go on."""
        return replace(self._delta((), "", Stop(FinishReason.ERROR)), error=error)

    def _read(self, token_id: int) -> tuple[str, Stop | None]:
        """Return the text that the newest token completes, and the end of the sequence if the token ends it."""
        detokenizer, sequence = self._detokenizer, self.sequence
        stop, text = self._stop_at(token_id), ""
        if stop is None:
            may_stop = _may_stop_on_text(sequence.request.params, sequence.num_output_tokens)
            text = detokenizer.push(token_id, may_stop)
            if detokenizer.stop_string is not None:
                stop = Stop(FinishReason.STOP, detokenizer.stop_string)
            elif not sequence.can_sample:
                stop = Stop(FinishReason.LENGTH)
        return (text + detokenizer.finish() if stop else text), stop

    def _stop_at(self, token_id: int) -> Stop | None:
        """Return the end of the sequence if its newest token is a stop token or EOS."""
        params = self.sequence.request.params
        if self.sequence.num_output_tokens <= params.min_tokens:
            return None
        if token_id in params.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        return None

    def _delta(
        self,
        token_ids: tuple[int, ...],
        text: str,
        stop: Stop | None,
        logprobs: tuple[PositionLogprobs, ...] = (),
        prompt_logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> TokenDelta:
        sequence = self.sequence
        num_output_tokens = sequence.num_output_tokens
        return TokenDelta(
            request_id=sequence.request.request_id,
            start=num_output_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            usage=Usage(sequence.num_prompt_tokens, num_output_tokens, sequence.num_cached_tokens or 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=stop.reason if stop else None,
            stop_reason=stop.cause if stop else None,
        )


def _may_stop_on_text(params: SamplingParams, num_output_tokens: int) -> bool:
    """Return True if a stop string that is completed by output token number `num_output_tokens` ends the sequence."""
    return num_output_tokens > params.min_tokens


def _undecodable(error: Exception) -> SequenceFailed:
    return SequenceFailed(f"decoding the output failed: {error}")
