"""Sender of due webhooks, with retries until each is delivered or dead."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from replicas.clock import Clock
from serve_app.jobs.webhooks.client import DeliveryFailed
from serve_app.jobs.webhooks.events import Delivery, host_of
from serve_app.jobs.webhooks.retries import next_attempt_unix_s
from serve_app.wakeup import Wakeup

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

    async def due_deliveries(
        self, now_unix_s: float, limit: int, without_hosts: frozenset[str] = frozenset()
    ) -> list[Delivery]:
        """Return deliveries whose next attempt is due, the longest due first.

        `without_hosts`: hosts (`host_of`) to leave out because they have an attempt under way. Otherwise deliveries
        to a slow host could fill the limit and hide those to others.
        """
        ...

    async def delivered(self, delivery_id: str) -> None:
        """Record a successful attempt."""
        ...

    async def delivery_failed(self, delivery_id: str, next_attempt_unix_s: float | None, error: str) -> None:
        """Record a failed attempt; `next_attempt_unix_s` None: it was the last, and the delivery is dead."""
        ...


class Poster(Protocol):
    """Client that makes one attempt, such as `WebhookClient`."""

    async def post(self, delivery: Delivery) -> None:
        """Post a delivery once, or raise DeliveryFailed."""
        ...


@dataclass(frozen=True, slots=True)
class SendingLimits:
    """Limits of one sender."""

    max_parallel: int = 64
    """Most attempts under way at the same time."""
    poll_period_s: float = 3.0
    """Most seconds between two queries for due deliveries; a notification brings the next one forward."""


class WebhookSender:
    """Loop that delivers each webhook at least once, unless all attempts fail until its time is over.

    1. Due deliveries are sent at once, at most `max_parallel` at a time.
    2. A host has at most one attempt under way, so a slow host takes up only one place.
    3. An attempt keeps its place until its outcome is recorded. If recording fails, it is repeated, and the webhook
       is not sent again before it succeeds.
    4. If the process ends during an attempt, the next process repeats the attempt with the same id.
    """

    def __init__(
        self,
        outbox: Outbox,
        client: Poster,
        rng: random.Random,
        clock: Clock,
        limits: SendingLimits = SendingLimits(),
    ) -> None:
        self._outbox = outbox
        self._client = client
        self._rng = rng
        self._clock = clock
        self._limits = limits
        self._attempts: dict[str, asyncio.Task[None]] = {}
        """Attempts under way, by host."""
        self._wakeup = Wakeup()
        self._outcomes: Counter[AttemptOutcome] = Counter(dict.fromkeys(AttemptOutcome, 0))

    @property
    def outcomes(self) -> Mapping[AttemptOutcome, int]:
        """Number of attempts since the start, by outcome."""
        return self._outcomes

    def notify(self) -> None:
        """Look for due deliveries now, because one was enqueued."""
        self._wakeup.set()

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
                busy = frozenset(self._attempts)
                due = await self._outbox.due_deliveries(self._clock.unix(), num_free, busy)
                if sum(self._start(delivery) for delivery in due) == 0:
                    return
        except Exception:  # the database may be unreachable for a while; the sender must survive that
            logger.exception("due deliveries could not be read")

    def _start(self, delivery: Delivery) -> bool:
        """Begin an attempt and return True, unless its host has one under way."""
        host = host_of(delivery.url)
        if host in self._attempts:
            return False
        task = asyncio.create_task(self._attempt(delivery))
        self._attempts[host] = task
        task.add_done_callback(lambda _: self._end(host))
        return True

    def _end(self, host: str) -> None:
        del self._attempts[host]
        self._wakeup.set()

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            await self._client.post(delivery)
        except DeliveryFailed as error:
            await self._fail(delivery, str(error))
        except Exception as error:  # a bug must not end all deliveries, and must not be retried without a delay
            logger.exception("a webhook could not be sent", extra={"delivery_id": delivery.id})
            await self._fail(delivery, f"internal error: {type(error).__name__}")
        else:
            await self._note(AttemptOutcome.DELIVERED, lambda: self._outbox.delivered(delivery.id))

    async def _fail(self, delivery: Delivery, why: str) -> None:
        next_unix_s = next_attempt_unix_s(delivery, self._clock.unix(), self._rng)
        outcome = AttemptOutcome.DEAD if next_unix_s is None else AttemptOutcome.FAILED
        logger.warning(
            "a webhook was not delivered",
            extra={"delivery_id": delivery.id, "batch_id": delivery.batch_id, "outcome": outcome.value, "why": why},
        )
        error = why[:_MAX_ERROR_CHARACTERS]
        await self._note(outcome, lambda: self._outbox.delivery_failed(delivery.id, next_unix_s, error))

    async def _note(self, outcome: AttemptOutcome, note: Callable[[], Awaitable[None]]) -> None:
        """Record an outcome, trying until the database accepts it: until then the delivery still looks due."""
        self._outcomes[outcome] += 1
        while True:
            try:
                return await note()
            except Exception:
                logger.exception("the outcome of a webhook could not be recorded")
                await asyncio.sleep(self._limits.poll_period_s)
