"""Run of a benchmark: probes of the server, warm-up, then one level of load after another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from serve_app.benchmark.client import READ_BUFFER_BYTES, Client
from serve_app.benchmark.levels import Extent, Level, LevelRun, Offer, limited
from serve_app.benchmark.prompts import TokenScale
from serve_app.benchmark.retries import RetryingClient
from serve_app.benchmark.rows import Outcome, Row
from serve_app.benchmark.sender import send_together
from serve_app.benchmark.workload import RequestFactory, Workload

_PROBE_WORDS = (16, 144)
"""Numbers of words of the two probes; both begin with the same words."""
_BODY_REFUSED = (400, 422)
_CONNECT_LIMIT_S = 10.0
_KEEP_ALIVE_S = 2.0
"""Time for which an idle connection is used again. Servers close theirs after 5 s and more."""


class ServerRefused(Exception):
    """Error of the server, or of the way to it, at the first request."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class Server:
    """Server under load."""

    url: str
    """Root of the server: no `/v1`, no final slash."""
    api_key: str | None = None
    timeout_s: float = 600.0
    """Longest duration of one request."""
    has_retries: bool = False
    """True: a request that is refused is sent again, as OpenAI's clients do; False: never."""

    def session(self) -> aiohttp.ClientSession:
        """Return a session with as many connections as requests."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=_CONNECT_LIMIT_S),
            headers={} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"},
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,
        )


class Benchmark:
    """Benchmark of one server with one workload; the server has answered its probes."""

    def __init__(self, server: Server, workload: Workload, rng: random.Random) -> None:
        self._server = server
        self.workload = workload
        self._factory = RequestFactory(workload, rng)

    async def run(self, level: Level, extent: Extent, run: LevelRun) -> None:
        """Offer one level of load; `run` tells how far it is. When cancelled, open requests end as cut off."""
        async with self._server.session() as session:
            if extent.num_warmup:
                clock = _clock()
                requests = limited(self._factory.requests("warmup"), extent.num_warmup, None)
                client = Client(session, self._url, clock)
                await send_together(client, clock, requests, level.num_together or extent.num_warmup)
            cpu_s, clock = time.process_time(), _clock()
            run.started_unix_s = time.time()
            client = Client(session, self._url, clock)
            sending = RetryingClient(client, random.Random()) if self._server.has_retries else client
            try:
                await level.send(Offer(sending, clock, self._factory, extent, self.workload.seed, run))
            finally:
                run.cpu_share = (time.process_time() - cpu_s) / max(1e-9, clock())

    @property
    def _url(self) -> str:
        return self._server.url + self.workload.endpoint.path


async def probed(server: Server, workload: Workload, rng: random.Random) -> Benchmark:
    """Return the benchmark of a server, after first requests that tell how it counts tokens and if it sends their ids.

    Raises:
        ServerRefused: the first request failed.
    """
    async with server.session() as session:
        client = Client(session, server.url + workload.endpoint.path, _clock())
        with_ids = replace(workload, fields={"return_token_ids": True, **workload.fields})
        few = await _probe(client, with_ids, _PROBE_WORDS[0])
        if few.status not in _BODY_REFUSED:
            workload = with_ids
        else:
            few = await _probe(client, workload, _PROBE_WORDS[0])
        if few.outcome is not Outcome.OK:
            status = "" if few.status is None or few.status < 400 else f" (HTTP {few.status})"
            raise ServerRefused(f"{few.error_message or few.outcome.value}{status}")
        many = await _probe(client, workload, _PROBE_WORDS[1])
    return Benchmark(server, replace(workload, scale=_scale_of(few, many)), rng)


async def _probe(client: Client, workload: Workload, num_words: int) -> Row:
    row = Row(0, num_words, 1, client.clock(), stream="probe")
    factory = RequestFactory(replace(workload, shared_prefix_tokens=0), random.Random(workload.seed))
    request = factory.request(row, None)
    await client.run(request.body, row)
    return row


def _scale_of(few: Row, many: Row) -> TokenScale:
    """Return the scale of the server's counts; one token a word if it counts none."""
    if few.usage_prompt_tokens is None:
        return TokenScale()
    first = (_PROBE_WORDS[0], few.usage_prompt_tokens)
    if many.usage_prompt_tokens is None:  # the longer one may be too long for the model
        return TokenScale.through((0, 0), first)
    return TokenScale.through(first, (_PROBE_WORDS[1], many.usage_prompt_tokens))


def _clock() -> Callable[[], float]:
    """Return a clock of the seconds from now on."""
    started_s = time.monotonic()
    return lambda: time.monotonic() - started_s
