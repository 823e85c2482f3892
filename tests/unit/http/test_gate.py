"""The gate of an ingress: requests inside may end, further ones are refused, probes pass."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message

from replicas.errors import NoReplicaAvailable
from serve_app.http.exchange import SCOPE_KEY, Cancellation
from serve_app.http.gate import Gate, GateMiddleware
from testkit.limits import LIMIT_S


class Application:
    """ASGI application whose requests last until `finish` is set."""

    def __init__(self) -> None:
        self.num_started = 0
        self.finish = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        self.num_started += 1
        await self.finish.wait()


async def receive() -> Message:
    return {"type": "http.request"}


async def send(message: Message) -> None:
    pass


def request_to(path: str) -> dict[str, object]:
    return {"type": "http", "path": path, SCOPE_KEY: SimpleNamespace(cancellation=Cancellation())}


def test_a_closed_gate_waits_for_the_requests_inside():
    async def scenario() -> None:
        app, gate = Application(), Gate()
        through = GateMiddleware(app, gate)
        running = asyncio.create_task(through(request_to("/v1/models"), receive, send))
        await asyncio.sleep(0)
        closing = asyncio.create_task(gate.close(LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(NoReplicaAvailable) as refused:
            await through(request_to("/v1/models"), receive, send)
        assert refused.value.code == "draining"
        assert not closing.done()
        app.finish.set()
        assert await closing == 0
        await running
        assert app.num_started == 1

    asyncio.run(scenario())


def test_closing_gives_up_after_its_limit():
    async def scenario() -> None:
        gate = Gate()
        gate.enter(Cancellation())
        assert await gate.close(0.01) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [lambda gate: gate.remove(0.01), lambda gate: asyncio.create_task(gate.close(0.01))])
def test_requests_that_outlast_a_removal_or_a_stop_end_with_an_error(end):
    async def scenario() -> None:
        gate, cancellation = Gate(), Cancellation()
        gate.enter(cancellation)
        ending = end(gate)
        assert not gate.is_staying or ending is not None
        with pytest.raises(NoReplicaAvailable, match="not whole"):
            async with cancellation.within():
                await asyncio.sleep(LIMIT_S)
        gate.leave(cancellation)
        if ending is not None:
            assert await ending == 1

    asyncio.run(scenario())


def test_probes_pass_a_closed_gate_and_readiness_does_not():
    async def scenario() -> None:
        app, gate = Application(), Gate()
        app.finish.set()
        through = GateMiddleware(app, gate)
        await gate.close(LIMIT_S)
        for path in ("/health/live", "/metrics", "/load"):
            await through(request_to(path), receive, send)
        with pytest.raises(NoReplicaAvailable):
            await through(request_to("/health/ready"), receive, send)

    asyncio.run(scenario())


def test_a_failed_request_leaves_the_gate():
    async def scenario() -> None:
        async def fail(scope, receive, send) -> None:
            raise RuntimeError

        gate = Gate()
        with pytest.raises(RuntimeError):
            await GateMiddleware(fail, gate)(request_to("/v1/models"), receive, send)
        assert gate.num_inside == 0

    asyncio.run(scenario())
