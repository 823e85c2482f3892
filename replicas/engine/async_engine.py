"""Asynchronous engine: one thread runs the steps, and the event loop wakes at most once per step for all streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from replicas.engine.batch import Pooler, PoolerFactory
from replicas.engine.constraint import Constraint, ConstraintCompiler
from replicas.engine.engine import Engine
from replicas.engine.engine_thread import EngineThread
from replicas.engine.outbox import Coalescing, DeltaOutbox, FlushPolicy, Mailbox, failure
from replicas.engine.step_watch import StepWatch
from replicas.errors import EngineDead, InvalidRequest, ReplicaLost, ServingError, as_serving_error
from replicas.protocol import (
    Band,
    EngineMetrics,
    GenerateRequest,
    ReplicaStats,
    TokenDelta,
    Usage,
)
from replicas.timing.clock import Clock
from replicas.timing.cpu_scheduling import use_normal_scheduling

_log = logging.getLogger(__name__)

_STOP_LIMIT_S = 30.0
_CHECK_PERIOD_S = 60.0
"""Least time between two checks of an idle engine's invariants, seconds. A check takes milliseconds, in which no other
thread of the process runs Python code."""


class AsyncEngine:
    """Asynchronous front of an engine: owns the engine thread and the streams' mailboxes.

    Invariants:
        A request lives as long as its call of `generate_into`: cancelling the call aborts the request.
        Every stream that is read to its end has a finish reason, even if the engine dies.
    """

    def __init__(
        self,
        engine: Engine,
        coalescing: Coalescing,
        clock: Clock | None = None,
        constraints: ConstraintCompiler | None = None,
        steps: StepWatch | None = None,
        thread: EngineThread | None = None,
        poolers: PoolerFactory | None = None,
    ) -> None:
        """Prepare the engine thread. Called on the event loop that will read the streams.

        `steps` tells a hung step from a slow one; None: a step may take any time. The steps are the last work of
        `thread`; None: of a new one. `poolers` None: the model has no pooling.
        """
        self._engine = engine
        self._constraints = constraints
        self._poolers = poolers
        self._compiling = ThreadPoolExecutor(1, "constraints")
        self._coalescing = coalescing
        self._clock = clock or Clock()
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._steps = steps or StepWatch(math.inf)
        self._is_hung = False
        self._num_streams = 0
        self._mailboxes: dict[str, Mailbox] = {}
        """Mailbox of each open stream, by the id under which the engine has its request."""
        self._num_by_band = [0] * len(Band)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._stats = engine.stats()
        self._death: EngineDead | None = None
        self._next_check_s = -math.inf
        self._thread = thread or EngineThread()

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.run_last(self._run)

    async def generate_into(self, request: GenerateRequest, outbox: DeltaOutbox, number: int) -> None:
        """Generate one request as stream `number` of an outbox; return once the outbox's reader has the last delta.

        The last delta has a finish reason, and an `error` if the request failed. Cancelling the call aborts the
        request.

        Raises:
            ServingError: the outbox's reader is gone.
        """
        mailbox = outbox.open(number, self._policy_for(request), len(request.output_token_ids))
        try:
            try:
                self._check_takes_requests()
                constraint, pooler = await self._constraint_of(request), self._pooler_of(request)
                self._check_takes_requests()
            except ServingError as error:
                mailbox.put(_refusal(request, error))
                await mailbox.until_ended()
                return
            with self._register(request, mailbox) as engine_request_id:
                self._inbox.put(partial(self._add, replace(request, request_id=engine_request_id), constraint, pooler))
                await mailbox.until_ended()
        finally:
            outbox.discard(number)

    def flush_policy(self, band: Band) -> FlushPolicy:
        """Return the present flush policy of a stream of this band, given the number of open streams."""
        return self._coalescing.policy_for(sum(self._num_by_band[: band + 1]))

    @property
    def last_stats(self) -> ReplicaStats:
        """Load after the last step, as it was."""
        return self._stats

    def stats(self) -> ReplicaStats:
        """Return the load after the last step; while the engine is idle, the load now."""
        now = self._clock.unix()
        # A dead engine refuses every request, as a draining one does.
        stats = replace(
            self._stats,
            served_tokens=self._engine.served_tokens(),
            is_draining=self._stats.is_draining or self._death is not None,
        )
        if stats.num_running == stats.num_waiting == 0:
            return replace(stats, taken_unix_s=now)
        return replace(stats, stalled_s=max(0.0, now - stats.taken_unix_s))

    def metrics(self) -> EngineMetrics:
        """Return all of the engine's metrics; values of two successive steps may be mixed."""
        metrics = self._engine.metrics()
        if self._constraints is None:
            return metrics
        return replace(metrics, metrics=(*metrics.metrics, *self._constraints.metrics()))

    def check_alive(self) -> None:
        """Raise the error that ended the engine, if one did. A hung step ends it now: its streams fail at once.

        Raises:
            EngineDead: the engine has ended; the replica must be replaced.
        """
        hung_for_s = self._steps.hung_for_s(self._clock.monotonic(), self._engine.num_repeats)
        if self._death is None and hung_for_s is not None:
            self._is_hung = True
            self._die(EngineDead(f"the engine is hung: its step has not ended for {hung_for_s:.1f} s"))
        if self._death is not None:
            raise self._death

    def begin_drain(self) -> None:
        """Refuse new requests from now on; the load reports it."""
        self._inbox.put(self._engine.drain)

    async def drain(self) -> None:
        """Refuse new requests; return when the accepted ones have ended."""
        self.begin_drain()
        await self._is_idle.wait()

    async def stop(self) -> None:
        """End the engine thread after its present step; open streams end with `EngineDead`.

        A thread whose step hangs is left behind, at once or after `_STOP_LIMIT_S`; it ends with the process.
        """
        self._inbox.put(self._request_stop)
        if not self._is_hung:
            await asyncio.to_thread(self._thread.join, _STOP_LIMIT_S)
        self._die(EngineDead("the engine was stopped"))
        self._compiling.shutdown(wait=False)

    async def _constraint_of(self, request: GenerateRequest) -> Constraint | None:
        """Compile the request's constraint in the thread for that, so that no step and no stream waits for it.

        A compilation holds the GIL for milliseconds. Of one thread the engine's waits for at most one of them.
        """
        if not request.params.is_constrained:
            return None
        if self._constraints is None:
            raise InvalidRequest(
                "this replica's model has no tokenizer, so its output cannot have a grammar", "grammar"
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._compiling, self._constraints.constraint_of, request
        )

    def _pooler_of(self, request: GenerateRequest) -> Pooler | None:
        """Return the maker of the request's pooled output; None: it generates tokens."""
        if request.params.pool is None:
            return None
        if self._poolers is None:
            raise InvalidRequest("this replica's model generates; it has no pooling", "model")
        return self._poolers(request)

    @contextlib.contextmanager
    def _register(self, request: GenerateRequest, mailbox: Mailbox) -> Iterator[str]:
        """Count an open stream and deliver its deltas; yield its id in the engine.

        That id is unique: a caller may send a request again before its abort is done.
        """
        self._num_streams += 1
        engine_request_id = f"{request.request_id}#{self._num_streams}"
        self._mailboxes[engine_request_id] = mailbox
        self._num_by_band[request.band] += 1
        self._is_idle.clear()
        try:
            yield engine_request_id
        finally:
            if not mailbox.has_ended:
                self._inbox.put(partial(self._engine.abort, engine_request_id))
            del self._mailboxes[engine_request_id]
            self._num_by_band[request.band] -= 1
            if not self._mailboxes:
                self._is_idle.set()

    def _check_takes_requests(self) -> None:
        if self._death is not None:
            # Not EngineDead: this request was not in the engine when it died, so it cannot be the cause.
            raise ReplicaLost(f"no new requests after {self._death}", has_died=False)

    def _policy_for(self, request: GenerateRequest) -> Callable[[], FlushPolicy]:
        own_interval_s = request.delta_interval_s
        if own_interval_s is None:
            return partial(self.flush_policy, request.band)
        return partial(self._coalescing.unstreamed_policy, request.band, own_interval_s)

    def _run(self) -> None:
        try:
            use_normal_scheduling()
            while self._take_messages():
                self._steps.begin(self._clock.monotonic())
                deltas = self._engine.step()
                self._steps.end(self._clock.monotonic(), self._engine.num_repeats)
                self._post(deltas)
        except Exception as error:
            _log.exception("the engine died")
            self._loop.call_soon_threadsafe(self._die, EngineDead(f"the engine died: {type(error).__name__}: {error}"))

    def _request_stop(self) -> None:
        self._is_stopping = True

    def _take_messages(self) -> bool:
        """Apply all messages of the inbox, and wait for one while there is no work; return False to stop."""
        has_messages = False
        while not (self._inbox.empty() and self._engine.has_work):
            if not self._engine.has_work:
                self._check_invariants()
                self._stats = self._engine.stats()
            apply = self._inbox.get()
            apply()
            if self._is_stopping:
                return False
            has_messages = True
        if has_messages:
            # Report the new work before its first step. If that step hangs, the replica must not look idle.
            self._stats = self._engine.stats()
        return True

    def _check_invariants(self) -> None:
        """Check the idle engine's invariants, if the last check was long ago; one that fails ends the engine."""
        now = self._clock.monotonic()
        if now >= self._next_check_s:
            self._next_check_s = now + _CHECK_PERIOD_S
            self._engine.check_invariants()

    def _add(self, request: GenerateRequest, constraint: Constraint | None, pooler: Pooler | None) -> None:
        try:
            self._engine.add(request, constraint, pooler)
        except ServingError as error:
            self._post([_refusal(request, error)])
        except Exception as error:  # A request that is not valid after all: the others must not end with it.
            _log.exception("the request %s cannot be added", request.request_id)
            self._post([_refusal(request, as_serving_error(error))])

    def _post(self, deltas: list[TokenDelta]) -> None:
        """Hand a step's deltas to the event loop with one wake-up for all streams."""
        self._stats = self._engine.stats()
        if deltas:
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                mailbox.put(delta)

    def _die(self, death: EngineDead) -> None:
        self._death = death
        for request_id, mailbox in self._mailboxes.items():
            mailbox.fail(request_id, death)


def _refusal(request: GenerateRequest, error: ServingError) -> TokenDelta:
    num_output_tokens = len(request.output_token_ids)
    return failure(
        request.request_id, num_output_tokens, Usage(len(request.prompt_token_ids), num_output_tokens, 0), error
    )
