"""The served model: its public name and its card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from replicas.errors import ServingError
from replicas.protocol import ModelCard
from router.dispatch import Dispatcher


class KnownModel:
    """Cache of the served model's card, with the model's public name.

    The last known card stays in use while no replica answers. A request is then accepted and waits in flow control,
    where it wakes a deployment that has scaled to zero.
    """

    def __init__(self, name: str, dispatcher: Dispatcher, clock: Callable[[], float], max_age_s: float = 30.0) -> None:
        self.name = name
        self._dispatcher = dispatcher
        self._clock = clock
        self._max_age_s = max_age_s
        self._card: ModelCard | None = None
        self._asked_s = 0.0

    async def card(self) -> ModelCard:
        """Return the model's card; while replicas answer it is at most a little older than `max_age_s`.

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
        """Ask a replica for the model's card.

        Raises:
            NoReplicaAvailable: no replica answers.
        """
        self._card = await self._dispatcher.model_card()
        self._asked_s = self._clock()
        return self._card
