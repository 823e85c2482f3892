"""A replica hangs: it neither answers nor dies, and Serve takes half a minute to notice."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import LONG, NUM_SLOTS, body


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for as long as the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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
