"""A replica that an operator drains: its streams go on elsewhere, and it is replaced."""

import time

import httpx
import pytest

from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import body

pytestmark = pytest.mark.rotated

MANY = 12_000


def test_a_drained_replica_hands_its_streams_over_and_is_replaced(served: Raylets, clients: Clients):
    wanted = body(MANY)
    streams = served.open_in_turn(clients, [wanted] * 2)
    wait_for(lambda: all(stream.texts for stream in streams), "every stream runs")
    numbers = served.num_running()
    leaving = next(replica_id for replica_id, number in numbers.items() if number)
    drained = httpx.post(f"{served.app.url}/v1/replicas/{leaving}/drain", timeout=LIMIT_S, trust_env=False)
    assert drained.json() == {"replica_id": leaving, "status": "draining"}
    started_s = time.monotonic()
    wait_for(lambda: not served.num_running().get(leaving), "its streams have left")
    print(f"the streams left {time.monotonic() - started_s:.1f} s after the request")
    assert not any(stream.is_over for stream in streams)

    def is_replaced() -> bool:
        return leaving not in served.num_running() and len(served.num_running()) == len(numbers)

    wait_for(is_replaced, "another replica takes its place", START_LIMIT_S)
    print(f"replaced {time.monotonic() - started_s:.1f} s after the request")
    wait_for(lambda: all(stream.is_done for stream in streams), "every stream ends")
    assert len({stream.texts[0] for stream in streams}) == 1 and not any(stream.error for stream in streams)
