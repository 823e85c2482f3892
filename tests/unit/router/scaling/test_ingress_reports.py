"""Reports between ingresses over a model replica, and its detection of lost ingresses."""

import pytest

from router.scaling.ingress_reports import (
    DESIRED_REPLICAS,
    MAX_REPORT_AGE_S,
    IngressLiveness,
    IngressReport,
    IngressReportBoard,
    PendingWork,
)
from testkit.router.simulated_time import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def liveness(clock: FakeClock) -> IngressLiveness:
    return IngressLiveness(10.0, clock)


def test_ingresses_share_reports_and_the_highest_demand_wins(clock: FakeClock):
    board = IngressReportBoard(clock)
    a, b = IngressReport("a", (PendingWork(5, 2.0),), 1, 2), IngressReport("b", (), 0, 3)
    assert board.autoscaling_stats() == {}
    assert board.publish(a) == ()
    assert board.publish(b) == (a,)
    assert board.publish(a) == (b,)
    assert board.autoscaling_stats() == {DESIRED_REPLICAS: 3.0}
    clock.now += MAX_REPORT_AGE_S
    board.publish(a)
    clock.now += 1
    assert board.autoscaling_stats() == {DESIRED_REPLICAS: 2.0}
    assert board.publish(None) == (a,)


def test_an_ingress_is_lost_when_only_others_have_heartbeats(clock: FakeClock, liveness: IngressLiveness):
    liveness.heartbeat("gone")
    for second in range(1, 12):
        clock.now += 1.0
        liveness.heartbeat("there")
        assert liveness.is_lost("gone") is (second > 10)
    assert not liveness.is_lost("there")


def test_no_ingress_is_lost_where_none_has_heartbeats(clock: FakeClock, liveness: IngressLiveness):
    for ingress_id in "ab":
        liveness.heartbeat(ingress_id)
    clock.now += 1000.0
    assert not liveness.is_lost("a") and not liveness.is_lost("b")


def test_an_ingress_that_comes_back_is_not_lost(clock: FakeClock, liveness: IngressLiveness):
    liveness.heartbeat("a")
    clock.now += 20.0
    liveness.heartbeat("b")
    assert liveness.is_lost("a")
    liveness.heartbeat("a")
    assert not liveness.is_lost("a")
