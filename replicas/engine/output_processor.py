"""Output processor: turns step results into a sequence's text and deltas, and decides the end of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replicas.engine.batch import IncrementalDecoder, ItemResult, Pooler, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.errors import InvalidRequest, SequenceFailed, ServingError
from replicas.protocol import (
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenDelta,
    Usage,
    deltas_of,
    usages_of,
)

_MAX_FORCED_TOKENS = 16
"""Number of forced tokens that a sequence gets in a step. It bounds the work of the next step."""

DecoderFactory = Callable[[GenerateRequest], IncrementalDecoder]


@dataclass(frozen=True, slots=True)
class Stop:
    """End of a sequence; `cause` is the stop token id or stop string, None for EOS and length."""

    reason: FinishReason
    cause: int | str | None = None


class Detokenizer:
    """Detokenizer of one sequence's output, which also searches for its stop strings.

    Text that could be the beginning of a stop string is held back until later text decides it.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._first = frozenset(string[0] for string in stop)
        self._held = ""
        self.stop_string: str | None = None
        """Stop string that was found, or None; no text follows it."""

    def push(self, token_id: int, may_stop: bool) -> str:
        """Add a token; return the text that can be shown now.

        If `may_stop` and a stop string is complete, the text ends before it and `stop_string` is set.
        """
        text = self._decoder.push(token_id)
        if not self._stop:
            return text
        self._held += text
        if not may_stop:
            # Text from before `min_tokens` is not part of any later match.
            return self._release(len(self._held))
        if self._first.isdisjoint(self._held):
            return self._release(len(self._held))
        first_match = min(
            ((at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0),
            default=None,
            key=lambda match: match[0],
        )
        if first_match is not None:
            shown = self._release(first_match[0])
            self.stop_string, self._held = first_match[1], ""
            return shown
        return self._release(len(self._held) - self._possible_start_length())

    def finish(self) -> str:
        """Return the text still held back. Called when no token follows."""
        if self.stop_string is None:
            self._held += self._decoder.finish()
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _possible_start_length(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


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
            decoder = decoders(request)
            self._detokenizer = Detokenizer(decoder, request.params.stop)
            self.push: Callable[[int], str] = self._push if sequence.has_stop_or_constraint else decoder.push
            """Return the text that a token completes; see `Progress.deltas`."""
            self._end: Stop | None = None
            """End of the sequence that the pushed token has brought."""
            for index, token_id in enumerate(request.output_token_ids):
                # The reader has this text already. Text that was held back is held back again.
                self._detokenizer.push(token_id, may_stop=index >= request.params.min_tokens)
        except Exception as error:  # A tokenizer may raise anything; only this request fails.
            raise _undecodable(error) from error

    def _push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id, may_stop=True)
        self._end = self._end_at(token_id)
        return text

    def follow(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta of a token that was pushed, with the tokens that the constraint forces after it.

        It is the last one if a stop string or the constraint ends the sequence.
        """
        text, stop = self._followed(delta.text, self._end)
        if stop is None and not self.sequence.num_forced_tokens:
            return delta
        return self._delta(self._new_token_ids, text + self._detokenizer.finish() if self._end else text, stop)

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
            text, stop = self._followed(*self._read(result.token_id))
        except Exception as error:
            sequence.undo_append()
            return self.fail(fault_of(error))
        logprobs = () if result.logprobs is None else (result.logprobs,)
        return self._delta(self._new_token_ids, text, stop, logprobs, prompt_logprobs)

    def fail(self, error: ServingError) -> TokenDelta:
        """Return the last delta of a sequence that cannot go on."""
        return self._delta((), "", Stop(FinishReason.ERROR))._replace(error=error)

    def failed(self, message: str) -> TokenDelta:
        """Return the last delta of a sequence whose step failed."""
        return self.fail(self._constraint_fault() or SequenceFailed(message))

    def _read(self, token_id: int) -> tuple[str, Stop | None]:
        """Return the text that the newest token completes, and the end of the sequence if the token ends it."""
        detokenizer, sequence = self._detokenizer, self.sequence
        stop, text = self._stop_at(token_id), ""
        if stop is None:
            text = detokenizer.push(token_id, sequence.num_output_tokens > sequence.request.params.min_tokens)
            stop = self._end_at(token_id) or (None if sequence.can_sample else Stop(FinishReason.LENGTH))
        return (text + detokenizer.finish() if stop else text), stop

    def _end_at(self, token_id: int) -> Stop | None:
        """Return the end of the sequence if the newest token completes a stop string or the constraint."""
        if self._detokenizer.stop_string is not None:
            return Stop(FinishReason.STOP, self._detokenizer.stop_string)
        return Stop(FinishReason.STOP) if self._completes_constraint(token_id) else None

    def _followed(self, text: str, stop: Stop | None) -> tuple[str, Stop | None]:
        """Append the tokens that the constraint forces after the newest one; return the text and the end with them."""
        while stop is None and (token_id := self._forced_token_id()) is not None:
            self.sequence.append_forced(token_id)
            more, stop = self._read(token_id)
            text += more
        return text, stop

    @property
    def _new_token_ids(self) -> tuple[int, ...]:
        """Newest token that was not forced, and those after it."""
        return tuple(self.sequence.token_ids[-1 - self.sequence.num_forced_tokens :])

    def _completes_constraint(self, token_id: int) -> bool:
        """Give the token to the sequence's constraint, if it has one; return True if no other token may follow."""
        constraint = self.sequence.constraint
        if constraint is None:
            return False
        try:
            constraint.accept(token_id)
        except ValueError as error:
            raise self._constraint_fault() or SequenceFailed(f"the output left its grammar: {error}") from error
        return constraint.is_complete

    def _forced_token_id(self) -> int | None:
        """Return the next token if it needs no sampling, since the constraint allows no other.

        It is left to the sampler if a step in flight samples it, if its log probability is wanted, or if the request
        has limits of its own. The tokens of a waiting sequence do not change.
        """
        sequence, params = self.sequence, self.sequence.request.params
        has_enough = sequence.num_forced_tokens == _MAX_FORCED_TOKENS
        if sequence.constraint is None or has_enough or not sequence.can_be_forced:
            return None
        has_limits = params.allowed_token_ids or params.bad_words or sequence.num_output_tokens < params.min_tokens
        return None if has_limits or params.logprobs is not None else sequence.constraint.forced_token_id()

    def _constraint_fault(self) -> InvalidRequest | None:
        """Return the error of a sequence whose constraint cannot be followed further; None if it can."""
        constraint = self.sequence.constraint
        if constraint is None or constraint.error is None:
            return None
        return InvalidRequest(f"the grammar of the output cannot be followed: {constraint.error}")

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
        return _delta_of(self.sequence, token_ids, text, stop)._replace(
            logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a step that end no sequence, unless `follow` says so: each place of a list belongs to one sequence.

    The tokens have been appended; the numbers are those after them.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    num_output_tokens: list[int]
    work_tokens: list[int]
    device_s: list[float]

    def deltas(self, pushes: list[Callable[[int], str]]) -> tuple[list[TokenDelta], dict[int, ServingError]]:
        """Return the tokens' deltas, and the errors of those that cannot be decoded or accepted, by their places.

        `pushes` give the texts, one for each sequence. A delta in the place of an error has no meaning.
        """
        texts: list[str] = []
        faults: dict[int, ServingError] = {}
        for place, (push, token_id) in enumerate(zip(pushes, self.token_ids, strict=True)):
            try:
                texts.append(push(token_id))
            except Exception as error:
                texts.append("")
                faults[place] = fault_of(error)
        sequences, num_output_tokens = self.sequences, self.num_output_tokens
        usages = usages_of(
            [sequence.num_prompt_tokens for sequence in sequences],
            num_output_tokens,
            [sequence.num_cached_tokens or 0 for sequence in sequences],
            self.work_tokens,
            [sequence.recomputed_tokens for sequence in sequences],
            self.device_s,
        )
        starts = [number - 1 for number in num_output_tokens]
        return deltas_of([sequence.request_id for sequence in sequences], starts, self.token_ids, texts, usages), faults


class PooledProcessor:
    """Output processor of a sequence whose prompt's hidden states are pooled: it ends when the prompt is computed."""

    def __init__(self, sequence: Sequence, pooler: Pooler) -> None:
        self.sequence = sequence
        self._pooler = pooler

    def push(self, token_id: int) -> str:
        """Fail: a pooled sequence has no output token."""
        raise AssertionError(f"a pooled sequence has the output token {token_id}")

    def follow(self, delta: TokenDelta) -> TokenDelta:
        """Return `delta`: nothing follows."""
        return delta

    def advance(self, item: ScheduledSequence, result: ItemResult) -> TokenDelta | None:
        """Add a step's result for the sequence; return its delta with the last one, else None."""
        sequence = self.sequence
        if result.pooled is not None:
            self._pooler.push(item.start, result.pooled)
        if sequence.num_computed_tokens < sequence.num_tokens:
            return None
        try:
            pooled = self._pooler.finish()
        except ServingError as error:
            return self.fail(error)
        return _delta_of(sequence, stop=Stop(FinishReason.STOP))._replace(pooled=pooled)

    def fail(self, error: ServingError) -> TokenDelta:
        """Return the last delta of a sequence that cannot go on."""
        return _delta_of(self.sequence, stop=Stop(FinishReason.ERROR))._replace(error=error)

    def failed(self, message: str) -> TokenDelta:
        """Return the last delta of a sequence whose step failed."""
        return self.fail(SequenceFailed(message))


def _delta_of(
    sequence: Sequence, token_ids: tuple[int, ...] = (), text: str = "", stop: Stop | None = None
) -> TokenDelta:
    num_output_tokens = sequence.num_output_tokens
    usage = Usage(
        sequence.num_prompt_tokens,
        num_output_tokens,
        sequence.num_cached_tokens or 0,
        sequence.work_tokens,
        sequence.recomputed_tokens,
        sequence.device_s,
    )
    return TokenDelta(
        request_id=sequence.request.request_id,
        start=num_output_tokens - len(token_ids),
        token_ids=token_ids,
        text=text,
        usage=usage,
        finish_reason=stop.reason if stop else None,
        stop_reason=stop.cause if stop else None,
    )


def fault_of(error: Exception) -> ServingError:
    """Return the error of a sequence whose output cannot go on: a tokenizer may raise anything."""
    return error if isinstance(error, ServingError) else _undecodable(error)


def _undecodable(error: Exception) -> SequenceFailed:
    return SequenceFailed(f"decoding the output failed: {error}")
