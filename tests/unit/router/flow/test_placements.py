"""Corrections of tenants' charges by the service that they got through other ingresses."""

import random
from dataclasses import replace

import pytest

import router.flow.placements as placements_module
from replicas.engine.stats import TenantUsage
from replicas.protocol import Band, ReplicaStats, TenantTokens
from router.balancing.load_table import PollChanges
from router.flow.placements import UsageReconciler
from testkit.router.simulated_replicas import stats

BAND = Band.STANDARD


def served(replica_id: str = "a", **tokens: int) -> ReplicaStats:
    totals = tuple(TenantTokens(tenant, BAND, count) for tenant, count in tokens.items())
    return replace(stats(replica_id), served_tokens=totals)


class Polled:
    """Reconciler to which some first totals were reported, with its polls."""

    def __init__(self, *baseline: ReplicaStats) -> None:
        self.usage = UsageReconciler()
        self._answered: frozenset[str] = frozenset()
        assert self.poll(*baseline) == {}, "the history of a replica charges nobody"

    def record(self, tenant: str, tokens: int, replica_id: str = "a") -> None:
        """Note a charge of this ingress."""
        self.usage.record(replica_id, BAND, tenant, tokens)

    def poll(self, *answers: ReplicaStats) -> dict[tuple[str, Band], int]:
        """Take in the answers to a poll; return the corrections."""
        before, answered = self._answered, frozenset(stats.replica_id for stats in answers)
        self._answered = answered
        return self.usage.corrections(
            PollChanges([*answers], answered, [], joined=answered - before, left=before - answered)
        )


def test_only_the_requests_of_other_ingresses_are_charged() -> None:
    usage = Polled(served(x=0, y=0))
    usage.record("x", 100)
    assert usage.poll(served(x=100, y=70)) == {("y", BAND): 70}
    assert usage.poll(served(x=100, y=70)) == {}


def test_request_reported_before_it_is_charged_comes_out_right() -> None:
    usage = Polled(served(x=0))
    early = usage.poll(served(x=60))
    usage.record("x", 100)
    assert early["x", BAND] + usage.poll(served(x=100))["x", BAND] == 0


def test_prefix_hits_lower_the_charge() -> None:
    usage = Polled(served(x=0))
    usage.record("x", 100)
    assert usage.poll(served(x=30)) == {("x", BAND): -70}


def test_past_service_and_restarts_of_a_replica_are_not_charged() -> None:
    usage = Polled(served("a", x=1000))
    assert usage.poll(served("a", x=1000), served("b", x=500)) == {}
    assert usage.poll(served("b", x=520)) == {("x", BAND): 20}


def test_totals_of_several_replicas_add_up() -> None:
    usage = Polled(served("a", x=0), served("b", x=0))
    assert usage.poll(served("a", x=10), served("b", x=5)) == {("x", BAND): 15}


def test_replica_that_misses_a_poll_is_settled_when_it_is_back() -> None:
    usage = Polled(served("a", x=0), served("b", x=0))
    usage.record("x", 1000)
    assert usage.poll(served("b", x=0)) == {}
    assert usage.poll(served("a", x=1000), served("b", x=0)) == {}


def test_a_replica_that_stays_away_is_forgotten_and_comes_back_as_a_new_one() -> None:
    usage = Polled(served("a", x=0), served("b", x=0))
    usage.record("x", 1000)
    usage.record("x", 500, "never polled")
    for _ in range(placements_module._MAX_MISSED_POLLS):
        assert usage.poll(served("b", x=0)) == {}
        assert usage.usage._own.keys() == {"a", "never polled"}
    assert usage.poll(served("b", x=0)) == {}
    assert usage.usage._served.keys() == {"b"} and not usage.usage._own and not usage.usage._num_missed
    assert usage.poll(served("a", x=7000), served("b", x=1)) == {("x", BAND): 1}


def plainly_since(before: ReplicaStats, now: ReplicaStats) -> dict[tuple[str, Band], int]:
    """Compare two reports entry by entry; a tenant that the replica had forgotten counts from zero again."""
    known = {(entry.tenant, entry.band): entry.tokens for entry in before.served_tokens}
    totals = {(entry.tenant, entry.band): entry.tokens for entry in now.served_tokens}
    since = {
        key: tokens - known.get(key, 0) if tokens >= known.get(key, 0) else tokens for key, tokens in totals.items()
    }
    return {key: tokens for key, tokens in since.items() if tokens}


@pytest.mark.parametrize("seed", range(10))
def test_reading_a_report_from_its_end_finds_all_that_was_served(seed: int) -> None:
    rng, replica, usage, before = random.Random(seed), TenantUsage(), Polled(served()), served()
    for _ in range(300):
        for _ in range(rng.choice([0, 1, 20, 100])):
            replica.add(f"tenant-{rng.randrange(90)}", rng.choice([BAND, Band.BATCH]), rng.randrange(1, 10**6))
        report = replace(stats("a"), served_tokens=replica.snapshot())
        assert usage.poll(report) == plainly_since(before, report)
        before = report
