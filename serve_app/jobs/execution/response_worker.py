"""Worker that makes responses in the background, and commits their output before any reader sees it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from replicas.errors import DeadlineExceeded, InvalidRequest, ServingError
from replicas.protocol import TokenDelta
from serve_app.errors import reply_to
from serve_app.jobs.api.responses import ResponseEnd, ResponseStatus, StoredDelta
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.storage.response_outputs import (
    LeasedResponse,
    NewOutput,
    commit_outputs,
    has_waiting,
    held_numbers,
    lease_responses,
)
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.reply.stored_run import StoredRun, packed, unpacked
from serve_app.openai.service import CompletionService
from serve_app.protocols.responses.stored import restored, split_response, stored_delta
from serve_app.wakeup import Wakeup

logger = logging.getLogger(__name__)

_COMMIT_PERIOD_S = 0.08
"""Seconds between two commits while tokens arrive: a reader is this late, and a delta holds the tokens of this time."""
_MAX_RUNNING = 512
"""Most responses that a worker runs or has in flow control's queue at a time."""
_POLL_PERIOD_S = 1.0
"""Most seconds until responses are found that other processes queued, released or cancelled."""
_MAX_FAILURES = 3
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0


@dataclass(slots=True, eq=False)
class _Running:
    """Response that runs here, with the output that is not committed yet."""

    leased: LeasedResponse
    run: StoredRun
    deltas: list[StoredDelta]
    """Committed deltas, and the one that is being committed."""
    token_ids: list[int]
    """Output tokens, committed or not."""
    task: asyncio.Task[None] | None = None
    new_tokens: list[int] = field(default_factory=list)
    new_text: str = ""
    finish: str | None = None
    outcome: PreparedCompletion | Exception | None = None
    """Completion that has ended, or the error that ended it; None: it runs."""

    def add(self, delta: TokenDelta) -> None:
        """Add what the model wrote."""
        self.token_ids += delta.token_ids
        self.new_tokens += delta.token_ids
        self.new_text += delta.text
        self.finish = None if delta.finish_reason is None else delta.finish_reason.value

    def take(self) -> StoredDelta | None:
        """Return the delta with all that is new; None: nothing is."""
        if not (self.new_tokens or self.new_text or self.finish):
            return None
        delta = StoredDelta(len(self.deltas), packed(self.new_tokens), self.new_text, self.finish)
        self.deltas.append(delta)
        self.new_tokens, self.new_text, self.finish = [], "", None
        return delta


class ResponseWorker:
    """Set of tasks that run leased responses, and the loop that commits what they write.

    The output is a function of the stored run, so a worker that takes over goes on behind the committed tokens. Tokens
    that were not committed are generated again, and are the same.

    Invariant: readers see a delta after its commit; a delta that is committed is never written again.
    """

    def __init__(
        self, context: JobsContext, ownership: Ownership, service: CompletionService, on_changed: Callable[[str], None]
    ) -> None:
        """`on_changed` is called with the id of a response whose deltas or end were committed."""
        self._context = context
        self._ownership = ownership
        self._service = service
        self._on_changed = on_changed
        self._rng = random.Random()
        self._waiting = Wakeup()
        self._written = Wakeup()
        self._running: dict[int, _Running] = {}

    def notify(self) -> None:
        """Wake the worker, because a response may wait."""
        self._waiting.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease())
                tasks.create_task(self._commit())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop all responses without ending or releasing them."""
        for running in [*self._running.values()]:
            self._stop(running)

    def _stop(self, running: _Running) -> None:
        del self._running[running.leased.number]
        assert running.task is not None
        running.task.cancel()

    async def _lease(self) -> None:
        model, database = self._context.settings.model_name, self._context.database
        while True:
            room = _MAX_RUNNING - len(self._running)
            # Read first: a write transaction takes the database's only write lock.
            if room > 0 and await database.read(lambda c: has_waiting(c, model)):
                lease = partial(lease_responses, owner=self._ownership.id, model=model, most=room)
                for leased in await database.write(lease):
                    self._start(leased)
            await self._waiting.wait(_POLL_PERIOD_S)

    def _start(self, leased: LeasedResponse) -> None:
        token_ids = [token for delta in leased.deltas for token in unpacked(delta.token_ids)]
        running = _Running(leased, StoredRun.of_json(leased.run.plan), list(leased.deltas), token_ids)
        self._running[leased.number] = running
        running.task = asyncio.create_task(self._run(running))

    async def _run(self, running: _Running) -> None:
        """Run a response up to its end, which the next commit stores."""
        try:
            running.outcome = await self._generate(running)
        except ServingError as error:
            running.outcome = error
        except Exception as error:
            logger.exception("a response failed", extra={"response_id": running.leased.id})
            running.outcome = error
        self._written.set()

    async def _generate(self, running: _Running) -> PreparedCompletion:
        """Generate the rest of the output.

        Raises:
            ServingError: a retry does not help.
        """
        num_tries = num_failures = 0
        while True:
            prompt = unpacked(running.leased.run.prompt)
            prepared = restored(self._service, self._context.content_key, running.run, prompt, tuple(running.token_ids))
            try:
                async with self._service.streams(prepared) as deltas:
                    async for item in deltas:
                        prepared.progress.add(item)
                        running.add(item.delta)
                        self._written.set()
                return prepared
            except ServingError as error:
                num_failures += not (error.retryable or isinstance(error, DeadlineExceeded))
                if num_failures >= _MAX_FAILURES or isinstance(error, InvalidRequest):
                    raise
                num_tries += 1
                delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_tries, 10)) * self._rng.uniform(0.5, 1.5)
            await asyncio.sleep(delay_s)

    async def _commit(self) -> None:
        while True:
            await self._written.wait(_POLL_PERIOD_S)
            await self._flush()
            await asyncio.sleep(_COMMIT_PERIOD_S)

    async def _flush(self) -> None:
        """Commit all that is new in one transaction, then wake its readers; stop what is not held any more."""
        running, owner, database = [*self._running.values()], self._ownership.id, self._context.database
        outputs = [output for one in running if (output := self._output_of(one)) is not None]
        if outputs:
            held = await database.write(lambda c: commit_outputs(c, owner, outputs))
        else:
            held = await database.read(lambda c: held_numbers(c, owner)) if running else set()
        changed = {output.number for output in outputs}
        for one in running:
            number = one.leased.number
            if number not in held and self._running.get(number) is one:
                self._stop(one)
            if number in changed:
                self._on_changed(one.leased.id)

    def _output_of(self, running: _Running) -> NewOutput | None:
        if running.finish is not None and running.outcome is None:
            return None  # The last delta and the end are committed together: who takes over would go on behind it.
        delta = running.take()
        if running.outcome is not None:
            return NewOutput(running.leased.number, delta, self._end_of(running, running.outcome))
        return None if delta is None else NewOutput(running.leased.number, delta)

    def _end_of(self, running: _Running, outcome: PreparedCompletion | Exception) -> ResponseEnd:
        """Return the end of a response, made of its deltas as readers see them."""
        key = self._context.content_key
        prepared = outcome if not isinstance(outcome, Exception) else restored(self._service, key, running.run)
        reply = prepared.format
        start = 0
        for delta in running.deltas:
            read = stored_delta(start, delta.token_ids, delta.text, delta.finish)
            reply.chunks(IndexedDelta(0, read))
            start += len(read.token_ids)
        if isinstance(outcome, Exception):
            error = reply_to(outcome, running.leased.id)
            events = reply.failure({}, error.code, error.message)
        else:
            events = reply.closing({}, prepared.usage())
        response = events[-1]["response"]
        return ResponseEnd(running.leased.id, ResponseStatus(response["status"]), *split_response(response))
