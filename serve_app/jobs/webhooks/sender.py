"""Sender of due webhooks, with retries until each is delivered or dead."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Protocol

from replicas.timing.clock import Clock
from serve_app.jobs.webhooks.client import DeliveryFailed
from serve_app.jobs.webhooks.events import Delivery, host_of
from serve_app.jobs.webhooks.receivers import NONE_CLOSED, Closed, Receiver, ReceiverLimits, Receivers
from serve_app.wakeup import Wakeup

MAX_AGE_S = 72 * 3600.0
"""Seconds after the event at which attempts end."""
_FIRST_DELAY_S = 5.0
_MAX_DELAY_S = 4 * 3600.0
_MAX_DOUBLINGS = 20
_MAX_ERROR_CHARACTERS = 500

logger = logging.getLogger(__name__)


class AttemptOutcome(Enum):
    """Outcome of one attempt to deliver a webhook."""

    DELIVERED = "delivered"
    FAILED = "failed"
    """Another attempt will follow."""
    DEAD = "dead"
    """This attempt was the last."""


class Outbox(Protocol):
    """Store of webhook deliveries (transactional outbox)."""

    async def due_deliveries(self, now_unix_s: float, limit: int, closed: Closed = NONE_CLOSED) -> list[Delivery]:
        """Return deliveries whose next attempt is due, the longest due first.

        `closed`: receivers and tenants to leave out. Otherwise deliveries to a slow host could fill the limit and hide
        those to others.
        """

    async def claim(self, delivery_ids: Sequence[str], now_unix_s: float) -> set[str]:
        """Claim deliveries that are still due, and return their ids; other workers leave them alone."""

    async def delivered(self, delivery: Delivery) -> None:
        """Record a successful attempt."""

    async def delivery_failed(self, delivery: Delivery, next_attempt_unix_s: float | None, error: str) -> None:
        """Record a failed attempt; `next_attempt_unix_s` None: it was the last, and the delivery is dead."""


@dataclass(frozen=True, slots=True)
class SendingLimits:
    """Limits of one sender."""

    max_parallel: int = 64
    """Most attempts under way at the same time."""
    receivers: ReceiverLimits = field(default_factory=ReceiverLimits)
    poll_period_s: float = 3.0
    """Most seconds between two queries for due deliveries; the end of an attempt brings the next one forward."""


class WebhookSender:
    """Loop that delivers each webhook at least once, unless all attempts fail until its time is over.

    1. Due deliveries are sent at once, at most `max_parallel` at a time.
    2. A receiver and a tenant have at most a few attempts under way, and a receiver that does not answer pauses
       (`Receivers`). So a receiver that hangs delays only its own tenant's webhooks to it.
    3. An attempt keeps its place until its outcome is recorded. If recording fails, it is repeated, and the webhook
       is not sent again before it succeeds.
    4. One worker at a time has a delivery: it claims it before the attempt. If the worker dies during an attempt,
       another one repeats the attempt with the same id.
    """

    def __init__(
        self,
        outbox: Outbox,
        post: Callable[[Delivery], Awaitable[None]],
        rng: random.Random,
        clock: Clock,
        limits: SendingLimits = SendingLimits(),
    ) -> None:
        """`post`: makes one attempt, as `WebhookClient.post`."""
        self._outbox = outbox
        self._post = post
        self._rng = rng
        self._clock = clock
        self._limits = limits
        self._receivers = Receivers(limits.receivers, clock.monotonic)
        self._attempts: dict[str, asyncio.Task[bool]] = {}
        """Attempts under way, by delivery; each returns True if the receiver has answered."""
        self._wakeup = Wakeup()
        self.outcomes: Counter[AttemptOutcome] = Counter(dict.fromkeys(AttemptOutcome, 0))
        """Number of attempts since the start."""

    async def run(self) -> None:
        """Send due deliveries until cancelled."""
        try:
            while True:
                await self._start_due()
                await self._wakeup.wait(self._limits.poll_period_s)
        finally:
            attempts = list(self._attempts.values())
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _start_due(self) -> None:
        """Start attempts until none is due or no place is left; each query but the last starts at least one."""
        try:
            while (num_free := self._limits.max_parallel - len(self._attempts)) > 0:
                closed = replace(self._receivers.closed(), delivery_ids=frozenset(self._attempts))
                now = self._clock.unix()
                due = await self._outbox.due_deliveries(now, num_free, closed)
                # Its receiver or its tenant may have enough attempts.
                chosen = [delivery for delivery in due if self._receivers.begin(_receiver_of(delivery))]
                if not chosen or not await self._start(chosen, now):
                    return
        except Exception:  # the database may be unreachable for a while; the sender must survive that
            logger.exception("due deliveries could not be read")

    async def _start(self, chosen: Sequence[Delivery], now_unix_s: float) -> int:
        """Begin attempts, counted already, for the deliveries that no other worker has claimed; return their number."""
        claimed: set[str] = set()
        try:
            claimed = await self._outbox.claim([delivery.id for delivery in chosen], now_unix_s)
        finally:
            for delivery in chosen:
                receiver = _receiver_of(delivery)
                if delivery.id not in claimed:
                    self._receivers.give_up(receiver)
                    continue
                task = self._attempts[delivery.id] = asyncio.create_task(self._attempt(delivery))
                task.add_done_callback(partial(self._end, delivery.id, receiver))
        return len(claimed)

    def _end(self, delivery_id: str, receiver: Receiver, task: asyncio.Task[bool]) -> None:
        del self._attempts[delivery_id]
        self._receivers.end(receiver, has_answered=not task.cancelled() and task.result())
        self._wakeup.set()

    async def _attempt(self, delivery: Delivery) -> bool:
        """Send a delivery and record the outcome; return True if the receiver has answered."""
        try:
            await self._post(delivery)
        except DeliveryFailed as error:
            await self._fail(delivery, str(error))
            return error.has_answered
        except Exception as error:  # a bug must not end all deliveries, and must not be retried without a delay
            logger.exception("a webhook could not be sent", extra={"delivery_id": delivery.id})
            await self._fail(delivery, f"internal error: {type(error).__name__}")
        else:
            await self._note(AttemptOutcome.DELIVERED, lambda: self._outbox.delivered(delivery))
        return True

    async def _fail(self, delivery: Delivery, reason: str) -> None:
        next_unix_s = next_attempt_unix_s(delivery, self._clock.unix(), self._rng)
        outcome = AttemptOutcome.DEAD if next_unix_s is None else AttemptOutcome.FAILED
        logger.warning(
            "a webhook was not delivered",
            extra={
                "delivery_id": delivery.id,
                "batch_id": delivery.batch_id,
                "outcome": outcome.value,
                "reason": reason,
            },
        )
        error = reason[:_MAX_ERROR_CHARACTERS]
        await self._note(outcome, lambda: self._outbox.delivery_failed(delivery, next_unix_s, error))

    async def _note(self, outcome: AttemptOutcome, note: Callable[[], Awaitable[None]]) -> None:
        """Record an outcome, trying until the database accepts it: until then the delivery still looks due."""
        self.outcomes[outcome] += 1
        while True:
            try:
                return await note()
            except Exception:
                logger.exception("the outcome of a webhook could not be recorded")
                await asyncio.sleep(self._limits.poll_period_s)


def _receiver_of(delivery: Delivery) -> Receiver:
    return Receiver(delivery.tenant, host_of(delivery.url))


def next_attempt_unix_s(delivery: Delivery, now_unix_s: float, rng: random.Random) -> float | None:
    """Return the time of the next attempt, as unix seconds, after one that failed just now; None: there is none.

    1. The first delay is 5 s; each further delay is twice the one before, up to 4 hours.
    2. Each delay is varied at random by up to a quarter, so that deliveries that failed together spread out.
    3. There is no attempt later than 72 hours after the event.
    """
    doubled_s = _FIRST_DELAY_S * 2.0 ** min(delivery.num_attempts, _MAX_DOUBLINGS)
    at_unix_s = now_unix_s + min(_MAX_DELAY_S, doubled_s) * rng.uniform(0.75, 1.25)
    return at_unix_s if at_unix_s <= delivery.created_unix_s + MAX_AGE_S else None
