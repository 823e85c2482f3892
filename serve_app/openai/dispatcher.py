"""The model that is served: its public name and its card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from replicas.errors import ServingError
from replicas.protocol import ModelCard
from router.dispatch import Dispatcher


class KnownModel:
    """The one model that is served: its public name, and its card, which requests need not wait for.

    What is known stays in use while nobody answers: a request then waits where requests wait,
    and is what wakes a deployment that has scaled to zero.
    """

    def __init__(self, name: str, dispatcher: Dispatcher, clock: Callable[[], float], max_age_s: float = 30.0) -> None:
        self.name = name
        self._dispatcher = dispatcher
        self._clock = clock
        self._max_age_s = max_age_s
        self._card: ModelCard | None = None
        self._asked_s = 0.0

    async def card(self) -> ModelCard:
        """What the replicas serve, at most a little older than `max_age_s` while replicas answer.

        Raises:
            NoReplicaAvailable: no replica has ever answered.
        """
        if self._card is None:
            return await self.refresh()
        if self._clock() - self._asked_s > self._max_age_s:
            self._asked_s = self._clock()
            with contextlib.suppress(ServingError):
                return await self.refresh()
        return self._card

    async def refresh(self) -> ModelCard:
        """What a replica says now that it serves.

        Raises:
            NoReplicaAvailable: none answers.
        """
        self._card = await self._dispatcher.model_card()
        self._asked_s = self._clock()
        return self._card
