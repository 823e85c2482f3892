"""A replica tells an ingress that is gone from one that is only not heard of."""

from __future__ import annotations

from router.held_work import IngressWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_ingress_is_lost_when_others_were_heard_of_for_long_enough_without_it():
    clock = Clock()
    watch = IngressWatch(10.0, clock)
    watch.heard_of("gone")
    for _ in range(10):
        clock.now += 1.0
        watch.heard_of("there")
        assert not watch.is_lost("gone")
    clock.now += 1.0
    watch.heard_of("there")
    assert watch.is_lost("gone") and not watch.is_lost("there")


def test_nobody_is_lost_where_nobody_is_heard_of():
    clock = Clock()
    watch = IngressWatch(10.0, clock)
    watch.heard_of("a")
    watch.heard_of("b")
    clock.now += 1000.0
    assert not watch.is_lost("a") and not watch.is_lost("b")


def test_an_ingress_that_comes_back_is_not_lost():
    clock = Clock()
    watch = IngressWatch(10.0, clock)
    watch.heard_of("a")
    clock.now += 20.0
    watch.heard_of("b")
    assert watch.is_lost("a")
    watch.heard_of("a")
    assert not watch.is_lost("a")
