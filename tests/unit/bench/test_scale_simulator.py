"""The simulator of many ingresses and replicas: its loads and its faults."""

from itertools import pairwise
from pathlib import Path

import pytest

from bench.routing.streams import write_trace
from bench.scale.arrivals import LOADS, SimulatedRequest, arrivals_of, made_up
from bench.scale.cluster import Fault
from bench.scale.simulator import World, fairness, jain, run
from replicas.protocol import Band
from serve_app.benchmark.trace import read_requests

pytestmark = pytest.mark.rotated


def test_ingresses_together_serve_as_much_as_one_and_keep_the_order_of_bands() -> None:
    alone, together = (run(World(number, 4, num_slots=8, overload=3.0, duration_s=5.0)) for number in (1, 3))
    assert together["tokens_per_s"] == pytest.approx(alone["tokens_per_s"], rel=0.1)
    assert together["ttft_p99_s"]["interactive"] < 0.5, "simulated time: a few steps"
    assert together["queue_p99_s"]["interactive"] < 0.1 < together["queue_p99_s"]["standard"]
    assert together["batch_before_waiting_interactive"] == together["failed"] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("load", LOADS)
def test_uneven_loads_share_prefixes(load: str) -> None:
    figures = run(World(2, 4, 16, overload=2.0, duration_s=10.0, load=load))
    assert figures["tokens_per_s"] > 0 and (figures["prefix_hits"] > 0.2) == (load == "uneven")


def test_faults_lose_no_request_and_keep_the_order_of_bands() -> None:
    faults = (Fault.REPLICA, Fault.STALE, Fault.INGRESS)
    figures = run(World(3, 4, 8, overload=1.5, duration_s=12.0, faults=faults))
    undisturbed = run(World(3, 4, 8, overload=1.5, duration_s=12.0))
    assert figures["failed"] == figures["batch_before_waiting_interactive"] == 0
    assert figures["sent_again"] > 0
    assert 0.75 < figures["tokens_per_s"] / undisturbed["tokens_per_s"] < 1


def test_a_trace_is_replayed_as_it_was_made_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = list(made_up(LOADS["uneven"], requests_per_s=50.0, duration_s=5.0))
    write_trace(path, requests)
    assert read_requests(path, SimulatedRequest) == requests


def test_a_trace_of_headway_bench_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"time": 0.5, "prompt_tokens": 20, "max_tokens": 64, "band": "interactive"}\n'
        '{"time": 0.1, "prompt": "What is the capital of France?", "max_tokens": 8}\n'
    )
    first, second = arrivals_of(read_requests(path, SimulatedRequest))
    assert (first.at_s, len(first.request.prompt_token_ids), first.request.band) == (0.1, 7, Band.STANDARD)
    assert (second.at_s, len(second.request.prompt_token_ids), second.request.band) == (0.5, 20, Band.INTERACTIVE)
    figures = run(World(2, 1, 8, overload=1.0, duration_s=8.0, trace=path))
    assert figures["tokens_per_s"] * 8.0 == 72


def test_loads_come_in_order_at_their_rate() -> None:
    for load in LOADS.values():
        requests = list(made_up(load, requests_per_s=200.0, duration_s=50.0))
        assert all(a.time <= b.time for a, b in pairwise(requests))
        assert len(requests) == pytest.approx(10_000, rel=0.1)


def test_fairness_is_that_of_the_shares_that_tenants_ask_for() -> None:
    assert jain([5, 5, 5]) == 1.0
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert fairness({"a": 5, "b": 5}, {"a": 50, "b": 70}) == 1.0
    assert fairness({"a": 2, "b": 8}, {"a": 2, "b": 70}) == 1.0, "the first tenant asks for no more"
    assert fairness({"a": 8, "b": 2}, {"a": 50, "b": 70}) < 0.8
