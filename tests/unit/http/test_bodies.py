"""Bodies of requests: the work on one is its owner's."""

from collections.abc import Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.types import Message

from replicas.protocol import Band
from router.timeline import Timeline
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import SCOPE_KEY, Exchange
from serve_app.http.settings import IngressSettings
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.tokenize.worker_threads import WorkerThreads


class Workers:
    """Workers that do the work at once, and keep the names of those for whom they did it."""

    def __init__(self) -> None:
        self.owners: list[WorkOwner] = []

    async def run_by_size(
        self, work: Callable[[], Any], owner: WorkOwner, num_bytes: int, thread_bytes: int = 0
    ) -> Any:
        self.owners.append(owner)
        return work()


async def test_values_of_a_large_body_are_counted_for_the_owner_of_the_work() -> None:
    async def receive() -> Message:
        # Within a string punctuation looks like values until it is counted.
        return {"type": "http.request", "body": b'{"prompt": "%s"}' % (b"," * 100_000), "more_body": False}

    workers = Workers()
    limits = RequestLimits(max_body_values=1000)
    reader = BodyReader(IngressSettings("model", "model", limits=limits), cast("WorkerThreads", workers))
    exchange = Exchange("id", "id", "POST", "/", arrival_unix_s=0.0, timeline=Timeline(0.0))
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "headers": headers, SCOPE_KEY: exchange}, receive)
    owner = WorkOwner(Band.BATCH, "acme")
    assert await reader.convert(request, len, owner) == 1
    assert len(workers.owners) > 1 and set(workers.owners) == {owner}, "for the counts and the reading"
