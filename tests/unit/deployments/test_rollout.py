"""A rollout is refused where its new replicas would wait for ever, and each fault names the nodes that have it."""

import contextlib
from collections.abc import Mapping

import pytest

from serve_app.config import HeadwayConfig
from serve_app.deployments import rollout
from serve_app.deployments.nodes import merged
from serve_app.deployments.rollout import RolloutRefused, refuse_spanning, room_fault
from serve_app.deployments.serve_hooks import Deployed
from serve_app.preflight.machine import Finding


def running(num_replicas: int, cpus: float) -> Deployed:
    return Deployed("1", {"CPU": cpus, "GPU": 0.0}, tuple(("node", pid) for pid in range(num_replicas)))


@pytest.mark.parametrize(
    ("num_running", "cpus_before", "cpus", "free_cpus", "has_room"),
    [
        (1, 1, 1, [1], True),
        (3, 1, 1, [1], True),  # one after another
        (1, 1, 1, [0.5], False),
        (1, 1, 1, [0.5, 0.5], False),  # on no single node
        (2, 1, 2, [2], False),  # one fits, and then the last old one leaves too little for the second
        (2, 1, 2, [3], True),
        (2, 2, 1, [1], True),
        (1, 1, 0, [0], True),
    ],
)
def test_surge_needs_room_up_to_the_last_replica(
    num_running: int, cpus_before: float, cpus: float, free_cpus: list[float], has_room: bool
) -> None:
    config = HeadwayConfig(update="surge", cpus_per_replica=cpus, num_gpus_per_replica=0)
    free = [{"CPU": number} for number in free_cpus]
    fault = room_fault(config, running(num_running, cpus_before), free, [])
    assert (fault is None) == has_room, fault


def test_a_replica_that_fits_no_node_is_refused_before_the_old_ones_stop() -> None:
    nodes: list[Mapping[str, float]] = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}]
    for cpus, gpus, fits in ((4, 0, True), (2, 1, True), (5, 0, False), (4, 1, False)):
        config = HeadwayConfig(cpus_per_replica=cpus, num_gpus_per_replica=gpus)
        fault = room_fault(config, running(1, 1), [], nodes)
        assert (fault is None) == fits, fault
        assert fits or f"no node has {cpus} CPU" in str(fault)


@pytest.mark.parametrize(("num_gpus", "is_refused"), [(1.0, True), (2.0, False), (8.0, False)])
def test_ranks_are_on_the_gpus_of_one_node(monkeypatch: pytest.MonkeyPatch, num_gpus: float, is_refused: bool) -> None:
    monkeypatch.setattr(rollout, "most_gpus_of_a_node", lambda: num_gpus)
    config = HeadwayConfig(tensor_parallel_size=2, num_gpus_per_replica=2)
    with (
        pytest.raises(RolloutRefused, match="needs 2 GPUs of one node, and no node has more than 1;")
        if is_refused
        else contextlib.nullcontext()
    ):
        refuse_spanning(config)
    refuse_spanning(HeadwayConfig(tensor_parallel_size=2, num_gpus_per_replica=0))


def test_a_fault_names_its_nodes_unless_all_have_it() -> None:
    nodes = {f"{i}": f"node {i}" for i in range(5)}
    here, everywhere, fine = Finding("model", "no directory"), Finding("data_dir", "a file"), Finding("model", None)
    findings = {node_id: [here if node_id != "0" else fine, everywhere] for node_id in nodes}
    assert merged(findings, nodes) == [
        Finding("data_dir", "a file"),
        Finding("model", "no directory (on node 1, node 2, node 3 and 1 more)"),
    ]
    assert merged({"0": [fine], "1": [fine]}, nodes) == [fine]
