"""Every ingress orders tenants by what they were served through all of them."""

from __future__ import annotations

from dataclasses import replace

from replicas.protocol import Band, ReplicaStats, TenantTokens
from router.flow.usage import UsageReconciler
from testkit.router.simulated_replicas import stats

BAND = Band.STANDARD


def served(replica_id: str = "a", **tokens: int) -> ReplicaStats:
    totals = tuple(TenantTokens(tenant, BAND, count) for tenant, count in tokens.items())
    return replace(stats(replica_id), served_tokens=totals)


def test_what_others_asked_for_is_charged_and_ones_own_is_not_charged_twice() -> None:
    reconciler = UsageReconciler()
    reconciler.corrections([served(x=0, y=0)])
    reconciler.record("a", BAND, "x", 100)
    assert reconciler.corrections([served(x=100, y=70)]) == {("y", BAND): 70}
    assert reconciler.corrections([served(x=100, y=70)]) == {}


def test_request_reported_before_it_is_charged_comes_out_right() -> None:
    reconciler = UsageReconciler()
    reconciler.corrections([served(x=0)])
    corrections = reconciler.corrections([served(x=60)])
    reconciler.record("a", BAND, "x", 100)
    later = reconciler.corrections([served(x=100)])
    assert corrections["x", BAND] + later["x", BAND] == 0


def test_prefix_hits_lower_what_was_charged() -> None:
    reconciler = UsageReconciler()
    reconciler.corrections([served(x=0)])
    reconciler.record("a", BAND, "x", 100)
    assert reconciler.corrections([served(x=30)]) == {("x", BAND): -70}


def test_history_of_a_replica_and_its_restart_charge_nobody() -> None:
    reconciler = UsageReconciler()
    assert reconciler.corrections([served("a", x=1000)]) == {}
    assert reconciler.corrections([served("a", x=1000), served("b", x=500)]) == {}
    assert reconciler.corrections([served("b", x=520)]) == {("x", BAND): 20}


def test_totals_of_several_replicas_add_up() -> None:
    reconciler = UsageReconciler()
    reconciler.corrections([served("a", x=0), served("b", x=0)])
    assert reconciler.corrections([served("a", x=10), served("b", x=5)]) == {("x", BAND): 15}


def test_replica_that_misses_a_poll_is_settled_when_it_is_back() -> None:
    reconciler = UsageReconciler()
    reconciler.corrections([served("a", x=0), served("b", x=0)])
    reconciler.record("a", BAND, "x", 1000)
    assert reconciler.corrections([served("b", x=0)]) == {}
    assert reconciler.corrections([served("a", x=1000), served("b", x=0)]) == {}
