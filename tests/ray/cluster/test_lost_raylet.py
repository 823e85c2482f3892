"""A raylet is killed: the streams of its model replica go on elsewhere, and a new raylet takes its place."""

import time
from collections import Counter

import pytest

from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients, Stream
from tests.ray.cluster.conftest import LONG, NUM_SLOTS, body

pytestmark = pytest.mark.rotated

STREAM_S = 5.0
"""Least seconds of a stream, longer than the end of a raylet takes."""
_SAMPLE = 500
"""Tokens of the stream that measures the machine's speed."""


def long_enough(clients: Clients) -> int:
    """Return the number of tokens of a stream that takes at least `STREAM_S` on this machine, by the faster sample."""
    duration_s = min(sample_s(clients) for _ in range(2))
    return max(_SAMPLE, min(LONG, int(_SAMPLE * STREAM_S / duration_s)))


def sample_s(clients: Clients) -> float:
    started_s = time.monotonic()
    stream = clients.open(body(_SAMPLE))
    wait_for(lambda: stream.is_over, "the sample has ended")
    return time.monotonic() - started_s


def start(served: Raylets, clients: Clients, num_tokens: int) -> list[Stream]:
    """As many streams as the replica that stays has slots."""
    prompts = [f"{index} the quick brown fox" for index in range(NUM_SLOTS)]
    return served.open_in_turn(clients, [body(num_tokens, prompt=prompt) for prompt in prompts])


def wait_for_all(streams: list[Stream]) -> None:
    wait_for(lambda: all(stream.is_over for stream in streams), "every stream has ended")
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.finish_reasons for stream in streams] == [{0: "length"}] * len(streams)
    assert all(stream.is_done for stream in streams)


def test_streams_of_a_killed_raylet_continue_elsewhere(served: Raylets, clients: Clients):
    num_tokens = long_enough(clients)
    undisturbed = start(served, clients, num_tokens)
    wait_for_all(undisturbed)

    node_ids = {replica_id: served.node_of(replica_id) for replica_id in served.num_running()}
    streams = start(served, clients, num_tokens)
    wait_for(lambda: all(stream.num_characters > 50 for stream in streams), "every stream is in mid-decode")
    victim = streams[0].replica_id
    assert victim is not None
    [staying] = node_ids.keys() - {victim}
    served.kill_worker(node_ids[victim])
    assert not any(stream.finish_reasons for stream in streams if stream.replica_id == victim)
    assert {stream.replica_id for stream in streams} == {victim, staying}
    assert {served.ingress_of(stream) for stream in streams} == set(served.ingress_pids())
    wait_for(lambda: served.num_running().keys() == {staying}, "the lost replica is forgotten")
    wait_for_all(streams)
    assert [stream.texts for stream in streams] == [stream.texts for stream in undisturbed]

    node_id = served.add_worker()
    # One look: another may be answered by the other ingress, which has yet to hear of it.
    running = wait_for(lambda: len(found := served.num_running()) == 2 and found, "the new raylet has a replica")
    [new] = set(running) - {staying}
    assert new != victim and served.node_of(new) == node_id
    later = [clients.open(body(LONG, prompt=f"request {index}")) for index in range(2 * NUM_SLOTS)]
    both_full = {new: NUM_SLOTS, staying: NUM_SLOTS}
    wait_for(lambda: Counter(stream.replica_id for stream in later) == both_full, "both replicas are full")
