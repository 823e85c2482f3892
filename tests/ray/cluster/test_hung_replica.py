"""A replica hangs: it neither answers nor dies."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import LONG, NUM_SLOTS, body

pytestmark = pytest.mark.rotated

PROBES = ("live", "ready")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for as long as the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_hung_replicas_streams_go_on_elsewhere_and_it_is_replaced(served: Raylets, clients: Clients):
    wanted = body(2000)
    undisturbed = clients.open(wanted)
    wait_for(lambda: undisturbed.is_done, "a stream ends")
    streams = served.open_in_turn(clients, [wanted] * 4)
    wait_for(lambda: all(stream.texts for stream in streams), "every stream runs")
    hung, well = served.replicas()
    stopped_s = time.monotonic()
    with stopped(hung["pid"]):
        wait_for(lambda: all(stream.is_done for stream in streams), "every stream ends")
        print(f"streams ended {time.monotonic() - stopped_s:.1f} s after the stop")
        assert {stream.texts[0] for stream in streams} == {undisturbed.texts[0]}
        health = [httpx.get(f"{served.app.url}/health/{probe}", timeout=LIMIT_S).status_code for probe in PROBES]
        assert health == [200, 200]

        def is_replaced() -> bool:
            return served.num_running().keys() > {well["replica_id"]} and hung["replica_id"] not in served.num_running()

        wait_for(is_replaced, "another replica takes its place", START_LIMIT_S)
        print(f"replaced {time.monotonic() - stopped_s:.1f} s after the stop")


def test_a_hung_replica_gets_no_new_request(served: Raylets, clients: Clients):
    streams = served.open_in_turn(clients, [body(LONG)] * 4)
    wait_for(lambda: all(stream.texts for stream in streams), "every stream runs")
    hung, well = served.replicas()
    with stopped(hung["pid"]):
        wait_for(
            # So often that each ingress has answered.
            lambda: all(served.num_running().keys() == {well["replica_id"]} for _ in range(10)),
            "every ingress knows that one replica alone answers",
        )
        asked = [clients.open(body(8, prompt=f"request {index}")) for index in range(2 * NUM_SLOTS)]
        for stream in streams:
            stream.close()
        wait_for(lambda: all(stream.is_done for stream in asked), "all new requests are answered")
