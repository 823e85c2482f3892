"""A replica tells an ingress that is gone from one that is only not heard of."""

from __future__ import annotations

from router.scaling.ingress_reports import IngressLiveness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_ingress_is_lost_when_others_were_heard_of_for_long_enough_without_it():
    clock = Clock()
    liveness = IngressLiveness(10.0, clock)
    liveness.heartbeat("gone")
    for _ in range(10):
        clock.now += 1.0
        liveness.heartbeat("there")
        assert not liveness.is_lost("gone")
    clock.now += 1.0
    liveness.heartbeat("there")
    assert liveness.is_lost("gone") and not liveness.is_lost("there")


def test_nobody_is_lost_where_nobody_is_heard_of():
    clock = Clock()
    liveness = IngressLiveness(10.0, clock)
    liveness.heartbeat("a")
    liveness.heartbeat("b")
    clock.now += 1000.0
    assert not liveness.is_lost("a") and not liveness.is_lost("b")


def test_an_ingress_that_comes_back_is_not_lost():
    clock = Clock()
    liveness = IngressLiveness(10.0, clock)
    liveness.heartbeat("a")
    clock.now += 20.0
    liveness.heartbeat("b")
    assert liveness.is_lost("a")
    liveness.heartbeat("a")
    assert not liveness.is_lost("a")
