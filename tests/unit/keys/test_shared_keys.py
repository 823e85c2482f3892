"""Limits of API keys over several ingresses, which tell each other the keys that they use."""

import random

import pytest

from replicas.errors import Overloaded
from serve_app.keys.rate_limits import KeyLimiter, KeyLimits
from testkit.engine.shadow_runner import FakeClock

LIMIT = 60
LIMITS = KeyLimits(requests_per_minute=LIMIT, tokens_per_minute=100 * LIMIT)
REPORT_S = 1.5
"""Time between two reports of an ingress; the others hear of it as much later."""


class Ingresses:
    """Limiters of several ingresses that hear of each other late."""

    def __init__(self, number: int) -> None:
        self.clock = FakeClock()
        monotonic = self.clock.clock().monotonic
        self.reports: list[frozenset[str]] = [frozenset()] * number
        self.limiters = [KeyLimiter(monotonic, lambda own=own: self.peers(own)) for own in range(number)]  # type: ignore[misc]
        self.accepted_s: list[float] = []

    def peers(self, own: int) -> list[frozenset[str]]:
        return [keys for other, keys in enumerate(self.reports) if other != own]

    def report(self) -> None:
        self.reports = [limiter.keys_in_use() for limiter in self.limiters]

    def ask(self, number: int, num_tokens: int = 0) -> bool:
        use = self.limiters[number].use_of("k", LIMITS)
        assert use is not None
        try:
            use.begin()
            use.charge(num_tokens)
        except Overloaded:
            return False
        finally:
            use.end()
        self.accepted_s.append(self.clock.now)
        return True

    def most_in_a_minute(self) -> int:
        return max(sum(start <= at < start + 60 for at in self.accepted_s) for start in self.accepted_s)


@pytest.mark.parametrize("num_ingresses", [2, 8])
@pytest.mark.parametrize("is_spread", [False, True])
def test_a_key_gets_less_than_twice_its_limit(num_ingresses: int, is_spread: bool) -> None:
    """All ingresses are asked as often as possible, at once or one after the other."""
    world = Ingresses(num_ingresses)
    for step in range(1200):
        world.clock.now += 0.1
        if step % 15 == 0:
            world.report()
        asked = range(num_ingresses) if not is_spread else range(min(num_ingresses, 1 + step // 60))
        for number in asked:
            while world.ask(number):
                pass
    assert LIMIT <= world.most_in_a_minute() < 2 * LIMIT


@pytest.mark.parametrize("num_ingresses", [1, 8])
def test_a_key_that_is_used_through_one_ingress_gets_its_limit(num_ingresses: int) -> None:
    world, rng = Ingresses(num_ingresses), random.Random(0)
    for step in range(6000):
        world.clock.now += 0.1
        if step % 15 == 0:
            world.report()
        if rng.random() < 0.12:  # 72 requests a minute
            world.ask(0)
    assert len(world.accepted_s) >= 0.9 * LIMIT * 10


def test_tokens_are_shared_too() -> None:
    world = Ingresses(8)
    for step in range(1200):
        world.clock.now += 0.1
        if step % 15 == 0:
            world.report()
        for number in range(8):
            world.ask(number, num_tokens=500)
    assert len(world.accepted_s) * 500 < 2 * 2 * 100 * LIMIT + 8 * 500


def test_the_others_of_a_key_get_what_an_idle_ingress_leaves() -> None:
    world = Ingresses(2)
    for number in (0, 1):
        world.ask(number)
    world.report()
    both, now = world.limiters[0].use_of("k", LIMITS), world.clock.now
    while world.ask(0):
        pass
    world.clock.now = now + 20.0
    world.report()
    assert world.reports == [frozenset(), frozenset()]
    assert both is not None and (requests := both.requests()) is not None
    assert requests.num_left > 5 and world.ask(0)


def test_an_only_ingress_gives_a_minutes_amount_at_once() -> None:
    world = Ingresses(1)
    while world.ask(0):
        pass
    assert len(world.accepted_s) == LIMIT


def test_only_keys_with_limits_are_reported() -> None:
    limiter = KeyLimiter(FakeClock().clock().monotonic)
    limiter.use_of("unlimited", KeyLimits())
    limiter.use_of(None, LIMITS)
    limiter.use_of("limited", LIMITS)
    assert limiter.keys_in_use() == {"limited"}
