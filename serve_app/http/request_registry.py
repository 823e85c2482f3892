"""Registry of the completions of one ingress: those that run, and those that ended recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from replicas.errors import RequestAborted
from replicas.protocol import Band
from serve_app.errors import request_id_ambiguous, request_not_cancellable, request_not_found
from serve_app.http.exchange import CLIENT_CLOSED, Exchange
from serve_app.keys.authenticator import Principal
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.prepared_completion import ID_PREFIXES, RequestView
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.pooled_schema import AnyBody

MAX_AGE_S = 3600.0

_Key = tuple[str | None, str]
"""Tenant and id; without a tenant for operators."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of a completion that ended well."""

    ttft_s: float
    """From the arrival of the request to its first output, seconds."""
    tpot_s: float | None
    """(last - first output) / (output tokens - 1), seconds; None: there are fewer than two tokens."""


@dataclass(slots=True, eq=False)
class _Entry:
    """Completion in the registry."""

    exchange: Exchange | None
    """Exchange of a running completion; None: it has ended."""
    model: str
    stream: bool
    owner: WorkOwner
    tenant: str
    """Tenant of the API key, whose keys may see the completion."""
    keys: tuple[_Key, ...]
    ended_s: float = 0.0
    latency: Latency | None = None
    """Latencies; None: the completion runs, or did not end well."""
    description: JsonObject | None = None
    """Description of an ended completion."""


class RequestRegistry:
    """Registry of completions by id: the `x-request-id`, which a client may repeat, or the id of the reply.

    At most `max_ended` that ended are kept, for at most `MAX_AGE_S`; the number of those that run is bounded before.
    It holds no text of prompts or outputs. A tenant finds its own, an operator all.

    Invariants: an entry without an exchange has its description; a key leads to all entries that have it, oldest first.
    """

    def __init__(self, clock: Callable[[], float], max_ended: int = 1000) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._max_ended = max_ended
        self._running: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, _Entry] = OrderedDict()
        self._by_key: dict[_Key, dict[_Entry, None]] = {}

    def begin(self, exchange: Exchange, body: AnyBody, owner: WorkOwner) -> None:
        """Add a completion whose body has been read and parsed, and note the time in its timeline."""
        exchange.timeline.received(self._clock())
        tenant, ids = exchange.principal.tenant, dict.fromkeys((exchange.request_id, exchange.unique_id))
        keys = tuple((viewer, exchange_id) for viewer in (tenant, None) for exchange_id in ids)
        entry = _Entry(exchange, body.model, body.stream, owner, tenant, keys)
        self._running[exchange.unique_id] = entry
        for key in keys:
            self._by_key.setdefault(key, {})[entry] = None

    def end(self, exchange: Exchange) -> None:
        """Note the end of an exchange; one that is no completion is ignored."""
        entry = self._running.pop(exchange.unique_id, None)
        if entry is None:
            return
        entry.ended_s = self._clock()
        entry.latency = _latency_of(exchange)
        entry.description, entry.exchange = self._describe(entry, exchange), None
        self._ended[exchange.unique_id] = entry
        self._trim()

    def find(self, request_id: str, principal: Principal) -> JsonObject:
        """Return the description of the newest completion of an id.

        Raises:
            HttpError: 404, there is none that the principal may see.
        """
        return self._shown(next(reversed(self._by_key[self._key(request_id, principal)])))

    def cancel(self, request_id: str, principal: Principal) -> JsonObject:
        """Cancel all running completions of an id, and return the description of the newest.

        Raises:
            HttpError: 404, there is none that the principal may see; 409, all have ended, or several tenants have some.
        """
        entries = self._by_key[self._key(request_id, principal)]
        running = {entry: entry.exchange for entry in entries if entry.exchange}
        if not running:
            raise request_not_cancellable(request_id)
        if len({entry.tenant for entry in running}) > 1:
            raise request_id_ambiguous(request_id, [exchange.unique_id for exchange in running.values()])
        for exchange in running.values():
            exchange.cancellation.request()
        return self._shown(list(running)[-1])

    def newest(self, num_requests: int) -> list[JsonObject]:
        """Return descriptions: of the running completions, then of the ended ones, newest first."""
        self._trim()
        newest = islice(chain(reversed(self._running.values()), reversed(self._ended.values())), num_requests)
        return [self._shown(entry) for entry in newest]

    def latencies(self, max_age_s: float) -> dict[Band, list[Latency]]:
        """Return the latencies of the completions that ended well within the last `max_age_s`, by band."""
        self._trim()
        latencies: dict[Band, list[Latency]] = {band: [] for band in Band}
        oldest_s = self._clock() - max_age_s
        for entry in takewhile(lambda entry: entry.ended_s >= oldest_s, reversed(self._ended.values())):
            if entry.latency is not None:
                latencies[entry.owner.band].append(entry.latency)
        return latencies

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._ended) <= self._max_ended
        entries = [*self._running.values(), *self._ended.values()]
        assert all((entry.exchange is None) == (entry.description is not None) for entry in entries)
        assert all(self._by_key.values())
        known = {(key, entry) for key, of_key in self._by_key.items() for entry in of_key}
        assert known == {(key, entry) for entry in entries for key in entry.keys}

    def _key(self, request_id: str, principal: Principal) -> _Key:
        """Return the key by which the principal finds a completion.

        Raises:
            HttpError: 404, there is none.
        """
        self._trim()
        viewer = None if principal.is_operator else principal.tenant
        keys = ((viewer, request_id.removeprefix(prefix)) for prefix in ("", *ID_PREFIXES))
        key = next((key for key in keys if key in self._by_key), None)
        if key is None:
            raise request_not_found(request_id)
        return key

    def _trim(self) -> None:
        oldest_s = self._clock() - MAX_AGE_S
        while self._ended and (
            len(self._ended) > self._max_ended or next(iter(self._ended.values())).ended_s < oldest_s
        ):
            _, entry = self._ended.popitem(last=False)
            for key in entry.keys:
                self._by_key[key].pop(entry)
                if not self._by_key[key]:
                    del self._by_key[key]

    def _shown(self, entry: _Entry) -> JsonObject:
        if entry.exchange is not None:
            return self._describe(entry, entry.exchange)
        assert entry.description is not None
        return entry.description

    def _describe(self, entry: _Entry, exchange: Exchange) -> JsonObject:
        view = RequestView(
            request_id=exchange.request_id,
            status=_status(exchange),
            path=exchange.path,
            model=entry.model,
            stream=entry.stream,
            owner=entry.owner,
            arrival_unix_s=exchange.arrival_unix_s,
            http_status=exchange.status or None,
            error_code=None if exchange.error is None else exchange.error.code,
            timeline=exchange.slowest,
            prepared=exchange.prepared,
        )
        return view.describe(self._clock())


def _latency_of(exchange: Exchange) -> Latency | None:
    """Return the latencies of an exchange that ended; None if it has no complete answer."""
    timeline = exchange.slowest
    first_s, last_s, num_tokens = timeline.first_delta_s, timeline.finished_s, timeline.num_output_tokens
    if exchange.error is not None or first_s is None or last_s is None:
        return None
    tpot_s = None if num_tokens < 2 else (last_s - first_s) / (num_tokens - 1)
    return Latency(first_s - timeline.started_s, tpot_s)


def _status(exchange: Exchange) -> str:
    """Return the status of a completion: running, cancelling, completed, cancelled or failed."""
    if exchange.timeline.ended_s is None:
        return "cancelling" if exchange.cancellation.is_requested else "running"
    code = None if exchange.error is None else exchange.error.code
    if exchange.status == CLIENT_CLOSED or code == RequestAborted.code:
        return "cancelled"
    return "completed" if code is None and 200 <= exchange.status < 300 else "failed"
