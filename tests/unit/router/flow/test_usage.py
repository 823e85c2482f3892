"""Corrections of tenants' charges by the service that they got through other ingresses."""

import random
from dataclasses import replace

import pytest

from replicas.engine.stats import TenantUsage
from replicas.protocol import Band, ReplicaStats, TenantTokens
from router.flow.usage import UsageReconciler
from testkit.router.simulated_replicas import stats

BAND = Band.STANDARD


def served(replica_id: str = "a", **tokens: int) -> ReplicaStats:
    totals = tuple(TenantTokens(tenant, BAND, count) for tenant, count in tokens.items())
    return replace(stats(replica_id), served_tokens=totals)


def reconciler(*baseline: ReplicaStats) -> UsageReconciler:
    """Return a reconciler to which these first totals were reported."""
    made = UsageReconciler()
    assert made.corrections([*baseline]) == {}, "the history of a replica charges nobody"
    return made


def test_only_the_requests_of_other_ingresses_are_charged() -> None:
    usage = reconciler(served(x=0, y=0))
    usage.record("a", BAND, "x", 100)
    assert usage.corrections([served(x=100, y=70)]) == {("y", BAND): 70}
    assert usage.corrections([served(x=100, y=70)]) == {}


def test_request_reported_before_it_is_charged_comes_out_right() -> None:
    usage = reconciler(served(x=0))
    early = usage.corrections([served(x=60)])
    usage.record("a", BAND, "x", 100)
    assert early["x", BAND] + usage.corrections([served(x=100)])["x", BAND] == 0


def test_prefix_hits_lower_the_charge() -> None:
    usage = reconciler(served(x=0))
    usage.record("a", BAND, "x", 100)
    assert usage.corrections([served(x=30)]) == {("x", BAND): -70}


def test_past_service_and_restarts_of_a_replica_are_not_charged() -> None:
    usage = reconciler(served("a", x=1000))
    assert usage.corrections([served("a", x=1000), served("b", x=500)]) == {}
    assert usage.corrections([served("b", x=520)]) == {("x", BAND): 20}


def test_totals_of_several_replicas_add_up() -> None:
    usage = reconciler(served("a", x=0), served("b", x=0))
    assert usage.corrections([served("a", x=10), served("b", x=5)]) == {("x", BAND): 15}


def test_replica_that_misses_a_poll_is_settled_when_it_is_back() -> None:
    usage = reconciler(served("a", x=0), served("b", x=0))
    usage.record("a", BAND, "x", 1000)
    assert usage.corrections([served("b", x=0)]) == {}
    assert usage.corrections([served("a", x=1000), served("b", x=0)]) == {}


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
    rng, replica, usage, before = random.Random(seed), TenantUsage(), reconciler(served()), served()
    for _ in range(300):
        for _ in range(rng.choice([0, 1, 20, 100])):
            replica.add(f"tenant-{rng.randrange(90)}", rng.choice([BAND, Band.BATCH]), rng.randrange(1, 10**6))
        report = replace(stats("a"), served_tokens=replica.snapshot())
        assert usage.corrections([report]) == plainly_since(before, report)
        before = report
