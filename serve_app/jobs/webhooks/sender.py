"""Sends the webhooks that are owed, and tries again until they are delivered or dead."""

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
    """How an attempt to deliver ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    """There will be another."""
    DEAD = "dead"
    """It was the last."""


class Outbox(Protocol):
    """Deliveries that are owed."""

    async def due_deliveries(
        self, now_unix_s: float, limit: int, without_hosts: frozenset[str] = frozenset()
    ) -> list[Delivery]:
        """Deliveries whose next attempt is due, the longest due first.

        `without_hosts`: hosts of URLs (`host_of`) that have an attempt under way: deliveries to a slow host must not
        hide those to others.
        """
        ...

    async def delivered(self, delivery_id: str) -> None:
        """Note that the receiver has it."""
        ...

    async def delivery_failed(self, delivery_id: str, next_attempt_unix_s: float | None, error: str) -> None:
        """Note an attempt that failed; None: there is no next, it is dead."""
        ...


class Poster(Protocol):
    """Makes one attempt; `WebhookClient` is one."""

    async def post(self, delivery: Delivery) -> None:
        """Deliver, or raise DeliveryFailed."""
        ...


@dataclass(frozen=True, slots=True)
class SendingLimits:
    """Limits of one sender."""

    max_parallel: int = 64
    """Most attempts under way."""
    poll_period_s: float = 3.0
    """Seconds between two looks for deliveries that are due, unless there is news."""


class WebhookSender:
    """Delivers each webhook at least once, or until its time is over.

    1. What is due is sent at once, at most `max_parallel` at a time.
    2. A host has at most one attempt under way, so that a slow one takes up one place only.
    3. An attempt's outcome is noted before its place is given to another; where it cannot be noted now it is
       noted later, and not sent again meanwhile.
    4. An attempt that was cut off by the end of the process is made again by the next one, with the same id.
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
        """By host."""
        self._wakeup = Wakeup()
        self._outcomes: Counter[AttemptOutcome] = Counter(dict.fromkeys(AttemptOutcome, 0))

    @property
    def outcomes(self) -> Mapping[AttemptOutcome, int]:
        """Attempts since the start, by how they ended."""
        return self._outcomes

    def notify(self) -> None:
        """Look for deliveries now: one has been noted."""
        self._wakeup.set()

    async def run(self) -> None:
        """Send what is due until cancelled."""
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
        """Start attempts until none is due or no place is left; each look sees one delivery of a host at least."""
        try:
            while (num_free := self._limits.max_parallel - len(self._attempts)) > 0:
                busy = frozenset(self._attempts)
                due = await self._outbox.due_deliveries(self._clock.unix(), num_free, busy)
                if sum(self._start(delivery) for delivery in due) == 0:
                    return
        except Exception:  # the database may be away; the sender must outlive that
            logger.exception("deliveries that are due could not be read")

    def _start(self, delivery: Delivery) -> bool:
        """Begin an attempt, unless its host has one under way."""
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
        except Exception as error:  # a mistake of ours must not end all deliveries, nor be repeated at once
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
        """Note an outcome, however long the database is away: until then the delivery still looks due."""
        self._outcomes[outcome] += 1
        while True:
            try:
                return await note()
            except Exception:
                logger.exception("the outcome of a webhook could not be noted")
                await asyncio.sleep(self._limits.poll_period_s)
