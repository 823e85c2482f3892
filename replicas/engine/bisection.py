"""Bisection of a failed batch: it finds the sequences at fault, and tells their faults from one of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.protocol import GenerateRequest, SamplingParams

_log = logging.getLogger(__name__)

_MAX_UNEXPLAINED = 3
_FAULT = "the model failed to compute the request {}; the replica's log has the error under this id"

Run = Callable[[ScheduledBatch], list[ItemResult]]
"""Forward pass of a batch, with its results; it raises the error of a batch that fails as a whole."""


class Bisection:
    """Repetition of failed batches in parts, after which only the sequences at fault have failed.

    1. A batch of several sequences is repeated in two halves, one of a single sequence as it is. A half that fails is
       divided in the same way. A sequence that fails alone is at fault.
    2. If the last pass failed, a probe follows: one token that the device has computed before. If it fails, too, the
       device is broken.
    3. A batch of which no part fails is explained by no sequence. The device is broken if that happens to
       `_MAX_UNEXPLAINED` batches in a row.

    Computing an item twice writes the same KV. A batch of n sequences takes at most 2 n passes, with the probe.
    """

    def __init__(self, run: Run, block_size: int) -> None:
        self._run = run
        self._block_size = block_size
        self._good_token_id: int | None = None
        self._num_unexplained = 0

    def succeeded(self, batch: ScheduledBatch) -> None:
        """Note a batch that did not fail."""
        self._good_token_id = batch.columns.sequences[0].request.prompt_token_ids[0]
        self._num_unexplained = 0

    def repeat(self, items: Items[ScheduledSequence], cause: Exception) -> list[ItemResult]:
        """Repeat the items of a batch that failed with `cause`; return one result per item, in order.

        Raises:
            Exception: `cause`, if the device is broken. The results of all items are unknown.
        """
        if not items:
            return []
        _log.error("the forward pass of %s failed; it is repeated in parts", described(items), exc_info=cause)
        results: list[ItemResult] = []
        for part in _halves(items):
            results += self._repeat_part(part)
        if results[-1].error is not None and not self._is_device_alive(items):
            raise cause
        guilty = [item for item, result in zip(items, results, strict=True) if result.error is not None]
        if guilty:
            self._num_unexplained = 0
            _log.error("%d of %d sequences failed: %s", len(guilty), len(items), described(guilty))
            return results
        self._num_unexplained += 1
        if self._num_unexplained >= _MAX_UNEXPLAINED:
            raise cause
        return results

    def _repeat_part(self, items: Items[ScheduledSequence]) -> list[ItemResult]:
        try:
            return self._run(ScheduledBatch(tuple(items)))
        except Exception as error:
            if len(items) > 1:
                return [result for half in _halves(items) for result in self._repeat_part(half)]
            _log.error("the forward pass of %s failed", described(items), exc_info=error)
            return [ItemResult(error=_FAULT.format(_id_of(items[0])))]

    def _is_device_alive(self, items: Items[ScheduledSequence]) -> bool:
        """Run the probe, in a block of the last item, which has failed: its sequence ends if the device is alive."""
        last = items[-1]
        prompt, params = (self._probe_token_id(items),), SamplingParams(max_tokens=1, temperature=0.0)
        probe = Sequence(GenerateRequest("probe", prompt, params), arrival_s=0.0, deadline_s=None, arrival_index=0)
        # Position `last.start` is about to be written, so no other sequence shares its block.
        index = last.start // self._block_size
        probe.block_table = [last.sequence.block_table[index]]
        probe.more_tables = [[table[index]] for table in last.sequence.more_tables]
        try:
            self._run(ScheduledBatch((ScheduledSequence.of(probe, 0, 1),)))
        except Exception as error:
            _log.error("the device is broken: it also fails a token that it has computed before", exc_info=error)
            return False
        return True

    def _probe_token_id(self, items: Items[ScheduledSequence]) -> int:
        """Return a token that the device has computed, or else the first one that no item has."""
        if self._good_token_id is not None:
            return self._good_token_id
        suspects = {token_id for item in items for token_id in item.sequence.token_ids}
        return next(token_id for token_id in range(len(suspects) + 1) if token_id not in suspects)


def described(items: Items[ScheduledSequence]) -> str:
    """Return the sequences of a batch with their shapes, for the log: request, computed and new tokens, and blocks."""
    parts = (
        f"{item.sequence.request_id} (tokens {item.start} to {item.end} of {len(item.sequence.token_ids)}, "
        f"{len(item.sequence.block_table)} blocks)"
        for item in items
    )
    return f"{sum(item.num_tokens for item in items)} tokens of {len(items)} sequences: {', '.join(parts)}"


def _halves(items: Items[ScheduledSequence]) -> tuple[Items[ScheduledSequence], ...]:
    middle = len(items) // 2
    return (items[:middle], items[middle:]) if middle else (items,)


def _id_of(item: ScheduledSequence) -> str:
    """Return the id that the client knows: the engine adds the number of the stream."""
    return item.sequence.request_id.partition("#")[0]
