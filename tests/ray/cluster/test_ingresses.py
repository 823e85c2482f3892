"""Routing across ingresses, which know each other only by the reports of replicas."""

from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import LONG, NUM_REPLICAS, NUM_SLOTS, body

ALL_SLOTS = NUM_REPLICAS * NUM_SLOTS


def test_both_ingresses_get_requests_and_know_all_load(served: Raylets, clients: Clients):
    streams = served.open_in_turn(clients, [body(LONG)] * 4)
    assert {served.ingress_of(stream) for stream in streams} == set(served.ingress_pids())

    def load() -> tuple[int, int]:
        replicas = served.replicas()
        return sum(replica["num_running"] for replica in replicas), sum(
            replica["num_in_flight"] for replica in replicas
        )

    wait_for(lambda: (seen := load())[0] == 4 and 0 < seen[1] < 4, "an ingress tells its own requests from others'")


def test_interactive_preempts_batch_work_of_another_ingress(served: Raylets, clients: Clients):
    # One request, so through one ingress; a replica takes one batch sequence beyond its slots.
    batch = clients.open(body(LONG, n=NUM_REPLICAS * (NUM_SLOTS + 1), priority=2))
    wait_for(lambda: sum(served.num_running().values()) == ALL_SLOTS, "batch work fills every slot")
    [other] = set(served.ingress_pids()) - {served.ingress_of(batch)}
    first, before = served.open_at(clients, other, body(8, priority=0))
    urgent = [first, *before, *(clients.open(body(8, priority=0)) for _ in range(ALL_SLOTS))]
    wait_for(lambda: all(stream.is_done for stream in urgent), "every interactive request is answered")
    assert not batch.finish_reasons and not batch.is_over

    texts = dict(batch.texts)
    wait_for(
        lambda: len(texts) and all(len(batch.texts[index]) > len(text) for index, text in texts.items()),
        "batch work goes on where it was",
    )
    assert batch.error is None


def test_a_tenant_takes_a_slot_from_another_ingress(served: Raylets, clients: Clients):
    greedy = clients.open(body(LONG, n=ALL_SLOTS, user="greedy"))
    wait_for(lambda: sum(served.num_running().values()) == ALL_SLOTS, "one tenant holds every slot")
    [other] = set(served.ingress_pids()) - {served.ingress_of(greedy)}
    modest, _ = served.open_at(clients, other, body(50, user="modest"))
    wait_for(lambda: modest.is_done, "the other tenant is answered")
    assert not greedy.finish_reasons and greedy.error is None

    texts = dict(greedy.texts)
    wait_for(
        lambda: texts and all(len(greedy.texts[index]) > len(text) for index, text in texts.items()),
        "every sequence of the first tenant goes on where it was",
    )
    assert greedy.error is None


def test_a_disconnect_frees_a_slot_on_another_raylet(served: Raylets, clients: Clients):
    streams = {ingress: served.open_at(clients, ingress, body(LONG)) for ingress in served.ingress_pids()}
    num_others = sum(len(others) for _, others in streams.values())
    (leaving, _), (staying, _) = streams.values()
    wait_for(lambda: leaving.texts and staying.texts, "both streams run")
    assert len({served.node_of(replica_id) for replica_id in served.num_running()}) == NUM_REPLICAS
    leaving.close()
    wait_for(lambda: sum(served.num_running().values()) == num_others + 1, "its slot is free")
    num_before = staying.num_characters
    wait_for(lambda: staying.num_characters > num_before, "the other stream goes on")
    assert not staying.is_over
