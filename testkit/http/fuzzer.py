"""Fuzzer: sends random requests to a running server, and judges every answer and the server's state afterwards.

`python -m testkit.http.fuzzer URL --seed 1 --cases 1000` runs it; `--case 17` sends that case alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httpx

from testkit.http.documented_answers import DocumentedAnswers, Given
from testkit.http.fuzz_cases import Case, FuzzCases, HttpCase, RawCase
from testkit.http.message_events import checked, read_messages
from testkit.http.response_events import checked_response, read_responses

CASE_LIMIT_S = 60.0
"""Longest time of a case, seconds; a longer one counts as a hang."""
_PATIENCE_S = 0.5
"""Time that a client waits for an answer that it need not get, seconds."""
_ENDLESS = "/dashboard/events"
"""Path of a stream without an end, for which no client waits."""
_IDLE_LIMIT_S = 60.0
_NUM_CLIENTS = 16
_FAILURES = (500, 502)
_NOT_HTTP = b"Invalid HTTP request received."
"""Uvicorn's answer to bytes that are not HTTP (docs/limits.md)."""


@dataclass
class Report:
    """Result of a run."""

    seed: int
    problems: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """Answers by kind of case and status."""
    slowest_s: float = 0.0

    def note(self, number: int, case: Case, found: Iterable[str]) -> None:
        """Record the problems of a case."""
        self.problems += [f"--seed {self.seed} --case {number} ({case.kind}): {problem}" for problem in found]


class Fuzzer:
    """Clients that send the cases of one seed to a server."""

    def __init__(self, url: str, seed: int, model: str, headers: dict[str, str] | None = None) -> None:
        """`headers` are sent with each well-formed request that has none of the same name."""
        self._url = url
        self._seed = seed
        self._model = model
        self._headers = headers or {}

    async def run(self, numbers: Iterable[int]) -> Report:
        """Send the cases of these numbers, then wait until the server is idle; return what was found."""
        report, waiting = Report(self._seed), iter(numbers)
        # Uvicorn ends an idle connection after 5 s. On a busy machine the client may notice seconds late.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_NUM_CLIENTS, keepalive_expiry=0.5)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False) as http:
            document = (await http.get("/openapi.json")).json()
            documented = DocumentedAnswers(document)
            routes = tuple(
                f"{method.upper()} {path}"
                for path, operations in document["paths"].items()
                for method in operations
                if path != _ENDLESS
            )
            cases = FuzzCases(self._seed, self._model, routes)

            async def client() -> None:
                for number in waiting:
                    await self._play(number, cases.case(number), http, documented, report)

            await asyncio.gather(*(client() for _ in range(_NUM_CLIENTS)))
            report.problems += await self._left_behind(http)
        return report

    async def _play(
        self, number: int, case: Case, http: httpx.AsyncClient, documented: DocumentedAnswers, report: Report
    ) -> None:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(CASE_LIMIT_S):
                if isinstance(case, HttpCase):
                    given = await self._send(case, http)
                else:
                    given = await self._send_raw(case)
        except TimeoutError:
            report.note(number, case, [f"no answer within {CASE_LIMIT_S:g} s"])
        except httpx.TransportError as error:
            report.note(number, case, [f"the connection broke: {error!r}"])
        else:
            report.answers[f"{case.kind} {given.status if given else '-'}"] += 1
            if given is not None:
                report.note(number, case, _problems(given, documented, is_http=isinstance(case, HttpCase)))
        report.slowest_s = max(report.slowest_s, time.monotonic() - started_s)

    async def _send(self, case: HttpCase, http: httpx.AsyncClient) -> Given | None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in case.headers.items()]
        headers += [
            (name.encode(), value.encode()) for name, value in self._headers.items() if name not in case.headers
        ]
        request = http.build_request(case.method, case.path, headers=headers, content=case.content)
        try:
            async with asyncio.timeout(case.leaves_after_s):
                answer = await http.send(request)
        except TimeoutError:
            if case.leaves_after_s is None:
                raise
            return None
        path = unquote(urlsplit(str(request.url)).path)
        return Given(case.method, path, answer.status_code, answer.headers.get("content-type", ""), answer.content)

    async def _send_raw(self, case: RawCase) -> Given | None:
        """Send the pieces; return the first answer, None if there is none and need be none."""
        host, _, port = urlsplit(self._url).netloc.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        received = bytearray()
        try:
            with contextlib.suppress(ConnectionError):
                for piece in case.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(case.pause_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if case.is_answered else _PATIENCE_S):
                        while part := await reader.read(65536):
                            received += part
        finally:
            writer.close()
        return _parsed(bytes(received))

    async def _left_behind(self, http: httpx.AsyncClient) -> list[str]:
        """Wait until nothing runs and every block is free; return what is left after a time."""
        deadline_s, left = time.monotonic() + _IDLE_LIMIT_S, ["/load does not answer"]
        while left and time.monotonic() < deadline_s:
            answer = await http.get("/load", headers=self._headers)
            left = _busy(answer.json()) if answer.is_success else [f"/load answers {answer.status_code}"]
            await asyncio.sleep(0.05)
        answer = await http.get("/health/ready")
        return left + ([] if answer.is_success else [f"/health/ready answers {answer.status_code}: {answer.text}"])


def _busy(load: dict[str, Any]) -> list[str]:
    if not load["replicas"]:
        return ["there is no replica"]
    found = []
    for replica in load["replicas"]:
        num_open = replica["num_running"] + replica["num_waiting"] + replica["num_in_flight"]
        num_held = replica["num_blocks"] - replica["num_free_blocks"]
        if num_open or num_held:
            found.append(f"replica {replica['replica_id']} has {num_open} requests and {num_held} blocks at the end")
    return found


def _problems(given: Given, documented: DocumentedAnswers, is_http: bool) -> list[str]:
    if given.status in _FAILURES:
        return [f"{given.method} {given.path}: the server failed with {given.status}: {given.body[:300]!r}"]
    if given.method == "HEAD" or (given.method == "OPTIONS" and given.status < 400):
        return []
    if is_http:
        return documented.problems(given) + _disorder(given)
    if given.status < 400 or (given.status == 400 and given.body == _NOT_HTTP):
        return []
    try:
        error = json.loads(given.body)["error"]
        has_shape = {"message", "type", "param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        has_shape = False
    return [] if has_shape else [f"{given.status} without an error object: {given.body[:300]!r}"]


def _disorder(given: Given) -> list[str]:
    """Return what a strict client of an agents' protocol could not expect of a whole stream."""
    check = _STREAMS.get(given.path.rstrip("/"))
    if check is None or given.status != 200 or not given.content_type.startswith("text/event-stream"):
        return []
    try:
        check(given.body.decode())
    except (AssertionError, KeyError, ValueError) as error:
        return [f"{given.path}: events out of order: {error!r} in {given.body[:2000]!r}"]
    return []


_STREAMS: Mapping[str, Callable[[str], object]] = {
    "/v1/messages": lambda text: checked(read_messages(text)),
    "/v1/responses": lambda text: checked_response(read_responses(text)),
}
"""Checkers of streams by their path."""


class _Received(io.BytesIO):
    """Received bytes, as `http.client` reads them from a socket."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self


def _parsed(data: bytes) -> Given | None:
    """Return the first answer in what a server sent; None: it sent nothing."""
    if not data:
        return None
    response = HTTPResponse(cast(Any, _Received(data)))
    try:
        response.begin()
        body = response.read()
    except (HTTPException, ValueError) as error:
        return Given("RAW", "", 0, "", f"{error!r} in {data[:200]!r}".encode())
    return Given("RAW", "", response.status, response.headers.get("content-type", ""), body)


def main() -> int:
    """Fuzz a server; print and return what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--key", help="API key, an operator's")
    options = parser.parse_args()
    headers = {} if options.key is None else {"authorization": f"Bearer {options.key}"}
    numbers = range(options.cases) if options.case is None else [options.case]
    report = asyncio.run(Fuzzer(options.url, options.seed, options.model, headers).run(numbers))
    print("\n".join([*report.problems, f"{len(report.problems)} problems, slowest {report.slowest_s:.1f} s"]))
    print(json.dumps(report.answers, indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
