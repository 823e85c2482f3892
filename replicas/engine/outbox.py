"""Outbox of one reader: the deltas of all its streams, taken together when their flushes are due."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from replicas.errors import ServingError
from replicas.protocol import Band, FinishReason, TokenDelta, Usage, merge

_EARLY_S = 0.005
"""Time by which a flush may be early to leave together with another one; its next flush is not earlier for that."""
_EARLY_SHARE = 1 / 4
"""Share of its tokens that a flush may lack to leave together with a full one. Streams get a token in each step, so
both leave together from then on, and a batch costs as much as several deltas."""
_BATCHING_SHARE = 1 / 16
"""Longest batching delay as a share of the stream's age. A replica has 1/8 more batch requests than slots
(`batch_lookahead`), so its slots stay full for about 1/8 of a request's time."""


class FlushPolicy(NamedTuple):
    """Flush policy of a stream after its first delta: flush after `interval_s`, or earlier when `num_tokens` wait."""

    interval_s: float = 0.0
    num_tokens: int = 1
    is_aligned: bool = False
    """True if the flush times of streams with the same interval are aligned, so the event loop wakes once for all."""
    batching_delay_s: float = 0.0
    """Longest wait of a delta whose flush is due, for those of other streams; `_BATCHING_SHARE` limits it, too."""

    def next_flush_s(self, last_s: float) -> float:
        """Return the time of the flush after the one at `last_s`.

        An aligned time is at least half an interval away. The interval changes with the number of streams, and without
        this minimum a change could cause two flushes in a row.
        """
        if self.is_aligned and self.interval_s > 0 and math.isfinite(last_s):
            return math.floor(last_s / self.interval_s + 1.5) * self.interval_s
        return last_s + self.interval_s


_FLUSH_EACH_DELTA = FlushPolicy()


@dataclass(frozen=True, slots=True)
class Coalescing:
    """Coalescing of deltas: the flush policies of streams, and the limit on chunks of all streams together."""

    flush_policy: FlushPolicy = _FLUSH_EACH_DELTA
    max_stream_chunks_per_s: float = math.inf
    """Most chunks per second of all streams together, since each one costs processor time to carry. A stream is limited
    by the number of streams of its band and more urgent ones."""
    align_when_throttled: bool = False
    """True if throttled streams flush at the same time. That is best if the engine computes on the processors that
    carry the chunks. On other machines a burst of chunks would delay other messages."""
    batch_delay_s: float = 0.025
    """`batching_delay_s` of batch requests that are not streamed."""

    def policy_for(self, num_streams: int) -> FlushPolicy:
        """Return the flush policy of each of `num_streams` streams. A throttled one ignores the number of tokens."""
        interval_s = num_streams / self.max_stream_chunks_per_s
        if interval_s <= self.flush_policy.interval_s:
            return self.flush_policy
        return FlushPolicy(interval_s, sys.maxsize, self.align_when_throttled)

    def unstreamed_policy(self, band: Band, interval_s: float) -> FlushPolicy:
        """Return the flush policy of a request that is not streamed: its interval, whatever the number of tokens."""
        return FlushPolicy(interval_s, sys.maxsize, batching_delay_s=self.batch_delay_s if band is Band.BATCH else 0.0)


class Mailbox:
    """Mailbox of one stream in an outbox: merges the deltas that wait for the reader.

    It belongs to the event loop and is bounded by the request's `max_tokens`.
    """

    def __init__(self, changed: Callable[[Mailbox], None], flush_policy: Callable[[], FlushPolicy], num_tokens: int):
        """`changed` is called when deltas begin to wait or are to leave earlier.

        `flush_policy` is called before the first delta after a flush. `num_tokens` is the number of output tokens that
        the reader has.
        """
        self._changed = changed
        self._flush_policy = flush_policy
        self._num_tokens = num_tokens
        self._waiting: list[TokenDelta] = []
        self._num_waiting = 0
        """Number of tokens in `_waiting`."""
        self._last: TokenDelta | None = None
        """Last delta that was added; None: there was none."""
        self._now = asyncio.get_running_loop().time
        self._opened_s = self._now()
        self._policy = _FLUSH_EACH_DELTA
        self._flushed_s = -math.inf
        self._is_complete = False
        self._error: ServingError | None = None
        self._is_over = asyncio.Event()
        self.due_s = -math.inf
        """Earliest flush time, on the event loop's clock."""
        self.latest_s = -math.inf
        """Latest flush time, on the event loop's clock."""
        self.has_ended = False
        """True if the reader has the last delta."""

    def put(self, delta: TokenDelta) -> None:
        """Add the next delta of the sequence."""
        is_first = not self._waiting
        if is_first:
            self._policy = self._flush_policy()
            self._set_due(max(self._now(), self._policy.next_flush_s(self._flushed_s)))
        self._waiting.append(delta)
        self._last = delta
        self._num_waiting += len(delta.token_ids)
        self._is_complete = delta.finish_reason is not None
        is_full = self._is_complete or self._num_waiting >= self._policy.num_tokens
        if is_full:
            self._set_due(min(self.due_s, self._now()))
        if is_first or is_full:
            self._changed(self)

    @property
    def fullness(self) -> float:
        """Share of the tokens that wait in those of a flush; from 1 on it is due."""
        return self._num_waiting / self._policy.num_tokens

    def fail(self, request_id: str, error: ServingError) -> None:
        """End the stream with `error`, unless its last delta is already here."""
        if not self._is_complete:
            last = self._last or TokenDelta(request_id, self._num_tokens, (), "", Usage(0, 0, 0))
            self.put(failure(request_id, last.start + len(last.token_ids), last.usage, error))

    def take(self, now: float) -> TokenDelta:
        """Return all that waits as one delta."""
        deltas, self._waiting, self._num_waiting = self._waiting, [], 0
        self._flushed_s = min(max(now, self.due_s), now + _EARLY_S)
        if self._is_complete:
            self.has_ended = True
            self._is_over.set()
        return merge(deltas)

    def abandon(self, error: ServingError) -> None:
        """Note that the reader is gone."""
        self._error = error
        self._is_over.set()

    async def until_ended(self) -> None:
        """Return once the reader has the last delta.

        Raises:
            ServingError: the reader is gone.
        """
        await self._is_over.wait()
        if self._error is not None and not self.has_ended:
            raise self._error

    def _set_due(self, due_s: float) -> None:
        self.due_s = self.latest_s = due_s
        if self._policy.batching_delay_s:
            self.latest_s += min(self._policy.batching_delay_s, _BATCHING_SHARE * (due_s - self._opened_s))


class DeltaOutbox:
    """Outbox of one reader: mailboxes of all its streams, and one wake-up for those that are due together.

    It belongs to the event loop.

    Invariants:
        A stream's deltas leave in their order, in as many batches as its flush policy gives.
        Exactly the mailboxes with deltas wait; a discarded or abandoned one never does.
    """

    def __init__(self) -> None:
        self._mailboxes: dict[int, Mailbox] = {}
        self._waiting: dict[int, Mailbox] = {}
        self._wakes_s = math.inf
        """Time at which the reader looks again, if nothing wakes it."""
        self._wake = asyncio.Event()
        self._error: ServingError | None = None

    def open(self, number: int, flush_policy: Callable[[], FlushPolicy], num_tokens: int = 0) -> Mailbox:
        """Return the mailbox of a new stream, to be discarded at its end; see `Mailbox` for the arguments.

        Raises:
            ServingError: the reader is gone.
        """
        if self._error is not None:
            raise self._error

        def changed(mailbox: Mailbox) -> None:
            self._waiting[number] = mailbox
            if mailbox.latest_s < self._wakes_s:
                self._wake.set()

        mailbox = self._mailboxes[number] = Mailbox(changed, flush_policy, num_tokens)
        return mailbox

    def discard(self, number: int) -> None:
        """Drop a stream and its pending deltas."""
        self._mailboxes.pop(number, None)
        self._waiting.pop(number, None)

    async def take(self) -> list[tuple[int, TokenDelta]]:
        """Wait until a stream's flush can wait no longer; return a delta of each stream that is due then or soon."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            next_s = min((mailbox.latest_s for mailbox in self._waiting.values()), default=math.inf)
            if next_s <= now:
                return self._taken(now)
            self._wake.clear()
            self._wakes_s = next_s
            try:
                with contextlib.suppress(TimeoutError):
                    # On Python 3.11 `wait_for` sometimes swallows a cancellation.
                    async with asyncio.timeout_at(next_s if next_s < math.inf else None):
                        await self._wake.wait()
            finally:
                self._wakes_s = -math.inf

    def close(self, error: ServingError) -> None:
        """Note that the reader is gone: every open stream fails with `error`, and each new one."""
        self._error = error
        for mailbox in self._mailboxes.values():
            mailbox.abandon(error)
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert self._waiting.items() <= self._mailboxes.items()

    def _taken(self, now: float) -> list[tuple[int, TokenDelta]]:
        waiting, due_s = self._waiting.items(), now + _EARLY_S
        due = [(number, mailbox) for number, mailbox in waiting if mailbox.due_s <= due_s]
        if any(mailbox.fullness >= 1 for _, mailbox in due):
            least = 1 - _EARLY_SHARE
            due = [
                (number, mailbox) for number, mailbox in waiting if mailbox.due_s <= due_s or mailbox.fullness >= least
            ]
        for number, _ in due:
            del self._waiting[number]
        return [(number, mailbox.take(now)) for number, mailbox in due]


def failure(request_id: str, start: int, usage: Usage, error: ServingError) -> TokenDelta:
    """Return the last delta of a stream that failed."""
    return TokenDelta(request_id, start, (), "", usage, finish_reason=FinishReason.ERROR, error=error)
