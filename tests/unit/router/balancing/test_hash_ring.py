"""The hash ring: every ingress finds the same replica for a key."""

import random
from collections import Counter

import pytest

from router.balancing.hash_ring import CIRCLE, HashRing, distance, points_of, position_of


def ring_of(*replica_ids: str) -> HashRing:
    ring = HashRing()
    for replica_id in replica_ids:
        ring.add(replica_id)
    return ring


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_the_order_clockwise_is_that_of_the_distances(seed: int):
    rng = random.Random(seed)
    ring, names = HashRing(), [f"replica-{number}" for number in range(12)]
    for _ in range(80):
        name = rng.choice(names)
        if name in ring:
            ring.remove(name)
        else:
            ring.add(name)
        if rng.random() < 0.5:
            continue  # Some changes gather until the next look-up.
        ring.check_invariants()
        position = rng.choice([0, CIRCLE - 1, rng.randrange(CIRCLE)])
        ordered = sorted(ring, key=lambda name: ring.distance(name, position))
        assert list(dict.fromkeys(ring.clockwise(position))) == ordered


def test_a_position_beyond_the_last_point_goes_on_at_the_first():
    points = [10, 20]
    assert [distance(points, position) for position in (0, 10, 11, 20, 21)] == [10, 0, 9, 0, CIRCLE - 11]


def test_replicas_get_about_equal_shares_of_the_keys():
    ring = ring_of(*(f"replica-{number}" for number in range(50)))
    firsts = Counter(next(ring.clockwise(position_of(f"key-{number}".encode()))) for number in range(20_000))
    assert len(firsts) == 50 and max(firsts.values()) < 2 * 20_000 / 50


def test_points_depend_on_the_name_alone():
    assert points_of("a") == points_of("a") != points_of("b")
    assert len(set(points_of("a"))) == 32
