"""A sequence and the text that comes of it."""

from __future__ import annotations

from collections.abc import Callable

from replicas.engine.detokenizer import Detokenizer, IncrementalDecoder
from replicas.engine.sequence import Sequence
from replicas.engine.stopping import Stop, length_reached, may_stop_on_text, stop_token
from replicas.errors import SequenceFailed
from replicas.protocol import FinishReason, GenerateRequest

DecoderFactory = Callable[[GenerateRequest], IncrementalDecoder]


class Generation:
    """Reads a sequence's tokens as they become known, and says where it ends."""

    def __init__(self, sequence: Sequence, decoders: DecoderFactory) -> None:
        """Reads the output that the request came with, too.

        Raises:
            SequenceFailed: it cannot be decoded.
        """
        self.sequence = sequence
        request = sequence.request
        try:
            self._detokenizer = Detokenizer(decoders(request), request.params.stop)
            for index, token_id in enumerate(request.output_token_ids):
                # The reader has this text; what is held back of it is held back again.
                self._detokenizer.push(token_id, may_stop_on_text(request.params, index + 1))
        except Exception as error:  # Whatever a tokenizer raises is this request's own trouble.
            raise SequenceFailed(f"decoding the output failed: {error}") from error

    def read(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str, Stop | None]:
        """Text that the sequence's newest token makes known, and whether the sequence ends with it."""
        detokenizer, sequence = self._detokenizer, self.sequence
        stop = stop_token(sequence, eos_token_ids)
        text = (
            ""
            if stop
            else detokenizer.push(token_id, may_stop_on_text(sequence.request.params, sequence.num_output_tokens))
        )
        if detokenizer.stop_string is not None:
            stop = Stop(FinishReason.STOP, detokenizer.stop_string)
        stop = stop or length_reached(sequence)
        return (text + detokenizer.finish() if stop else text), stop
