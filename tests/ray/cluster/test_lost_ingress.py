"""An ingress is killed: the requests that were sent through it end, and no others."""

import os
import signal

import pytest

from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import LONG, NUM_SLOTS, body

pytestmark = pytest.mark.rotated


def test_a_killed_ingress_frees_its_slots_and_is_replaced(served: Raylets, clients: Clients):
    [(victim, pid), (other, _)] = served.ingress_pids().items()
    staying, others = served.open_at(clients, other, body(1500))
    lost, more = served.open_at(clients, victim, body(LONG, n=NUM_SLOTS))
    for stream in (*others, *more):
        stream.close()
    wait_for(lambda: len(lost.texts) == NUM_SLOTS and staying.texts, "every stream runs")
    os.kill(pid, signal.SIGKILL)
    # Nobody can give a client back the connection that its ingress held.
    wait_for(lambda: lost.is_over, "the client of the killed ingress hears of it")
    assert lost.error is not None and not lost.finish_reasons

    asked = [clients.open(body(8, prompt=f"request {index}")) for index in range(2 * NUM_SLOTS)]
    wait_for(lambda: all(stream.is_over for stream in (*asked, staying)), "all others are answered")
    assert all(stream.is_done and stream.error is None for stream in (*asked, staying))
    served.wait_until_idle()

    [replacement] = wait_for(lambda: set(served.ingress_pids()) - {victim, other}, "there is another ingress")
    stream, others = served.open_at(clients, replacement, body(LONG))
    for elsewhere in others:
        elsewhere.close()
    wait_for(lambda: stream.texts, "the replacement serves")
    assert victim not in served.ingress_pids()
