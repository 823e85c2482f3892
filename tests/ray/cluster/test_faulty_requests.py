"""Requests whose forward pass fails end alone; a broken device ends its engine, and the requests go on elsewhere."""

from pathlib import Path

import pytest

from testkit.engine.faulty_runner import GUILTY
from testkit.limits import START_LIMIT_S
from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import NUM_REPLICAS, NUM_SLOTS, body

pytestmark = pytest.mark.rotated

MANY = 1500
LONG = 6000
"""Tokens of streams that still run when a device breaks a second or two after they began."""


@pytest.mark.parametrize("num_guilty", [*(pytest.param(n, marks=pytest.mark.deep) for n in (1, 8)), 64])
def test_guilty_requests_fail_and_others_never_notice(served: Raylets, clients: Clients, num_guilty: int):
    replicas = {replica["replica_id"]: replica["pid"] for replica in served.replicas()}
    wanted = body(MANY)
    undisturbed = clients.open(wanted)
    wait_for(lambda: undisturbed.is_done, "a stream ends")
    good = served.open_in_turn(clients, [wanted] * NUM_REPLICAS)
    wait_for(lambda: all(stream.texts for stream in good), "every stream runs")
    guilty = [clients.open(body(8, prompt=list(GUILTY))) for _ in range(num_guilty)]
    wait_for(lambda: all(stream.is_over for stream in [*guilty, *good]), "every stream ends")
    assert {stream.texts[0] for stream in good} == {undisturbed.texts[0]}
    assert not any(stream.error for stream in good)
    assert {stream.status for stream in guilty} == {500}
    assert {replica["replica_id"]: replica["pid"] for replica in served.replicas()} == replicas, "no replica ended"


def test_a_broken_device_ends_its_engine_and_the_requests_go_on(served: Raylets, clients: Clients, faults: Path):
    wanted = body(LONG)
    undisturbed = clients.open(wanted)
    wait_for(lambda: undisturbed.is_done, "a stream ends")
    streams = served.open_in_turn(clients, [wanted] * NUM_REPLICAS * (NUM_SLOTS - 1))
    wait_for(lambda: all(stream.texts for stream in streams), "every stream runs")
    broken = served.replicas()[0]
    (faults / str(broken["pid"])).touch()
    wait_for(lambda: all(stream.is_done for stream in streams), "every stream ends")
    assert {stream.texts[0] for stream in streams} == {undisturbed.texts[0]}

    def is_replaced() -> bool:
        running = served.num_running()
        return broken["replica_id"] not in running and len(running) == NUM_REPLICAS

    wait_for(is_replaced, "another replica takes its place", START_LIMIT_S)
