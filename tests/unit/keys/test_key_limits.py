"""Limits of API keys: buckets of requests and tokens, requests at once, and key files."""

import random
from pathlib import Path

import pytest

from replicas.errors import Overloaded
from serve_app.keys.key_file import KeyOwner, changed_owners, digest_of, read_owners
from serve_app.keys.rate_limits import KeyLimiter, KeyLimits, TokenBucket
from testkit.engine.shadow_runner import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def limiter(clock: FakeClock) -> KeyLimiter:
    return KeyLimiter(clock.clock().monotonic)


def test_requests_of_a_minute_are_spread_over_it(clock: FakeClock) -> None:
    use = limiter(clock).use_of("k", KeyLimits(requests_per_minute=6))
    assert use is not None
    for _ in range(6):
        use.begin()
        use.end()
    with pytest.raises(Overloaded, match=r"used up its requests_per_minute, 6; the next is due in 10\.0 s") as refusal:
        use.begin()
    assert (refusal.value.reason, refusal.value.code) == ("key_requests_per_minute", "rate_limit_exceeded")
    assert refusal.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.001
    use.begin()
    with pytest.raises(Overloaded):
        use.begin()


def test_output_beyond_the_tokens_of_a_minute_is_paid_back(clock: FakeClock) -> None:
    use = limiter(clock).use_of("k", KeyLimits(tokens_per_minute=600))
    assert use is not None
    use.begin()
    use.charge(100)
    use.charge(1100)
    use.end()
    with pytest.raises(Overloaded, match="tokens_per_minute, 600"):
        use.begin()
    clock.now += 60.0
    with pytest.raises(Overloaded):
        use.begin()
    clock.now += 0.2
    use.begin()


def test_open_requests_are_limited_until_one_ends(clock: FakeClock) -> None:
    use = limiter(clock).use_of("k", KeyLimits(max_concurrent_requests=2))
    assert use is not None
    use.begin()
    use.begin()
    with pytest.raises(Overloaded, match="2 requests of this API key are open; its max_concurrent_requests is 2"):
        use.begin()
    use.end()
    use.end()
    use.begin()


def test_a_refused_request_costs_nothing(clock: FakeClock) -> None:
    use = limiter(clock).use_of("k", KeyLimits(requests_per_minute=60, max_concurrent_requests=1))
    assert use is not None
    use.begin()
    before = use.requests()
    with pytest.raises(Overloaded):
        use.begin()
    use.end()
    assert use.requests() == before and use.num_running == 1


def test_each_key_has_its_limits_and_changed_limits_start_anew(clock: FakeClock) -> None:
    keys, limits = limiter(clock), KeyLimits(requests_per_minute=1)
    first, second = keys.use_of("a", limits), keys.use_of("b", limits)
    assert first is not None and second is not None
    first.begin()
    second.begin()
    assert keys.use_of("a", limits) is first
    changed = keys.use_of("a", KeyLimits(requests_per_minute=2))
    assert changed is not None
    changed.begin()
    assert keys.use_of(None, limits) is None and keys.use_of("c", KeyLimits(max_tokens=5)) is not None


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_no_minute_gives_more_than_twice_its_amount(seed: int) -> None:
    """A full bucket, and what it fills by: the most in any minute, whenever the requests come."""
    rng, now_s, taken = random.Random(seed), 0.0, list[float]()
    bucket = TokenBucket(30, now_s)
    for _ in range(400):
        now_s += rng.expovariate(rng.choice([0.2, 5.0]))
        if bucket.wait_s(now_s) == 0:
            bucket.take(1, now_s)
            taken.append(now_s)
        left = bucket.allowance(now_s)
        assert 0 <= left.num_left <= 30
    assert max(sum(start <= each < start + 60 for each in taken) for start in taken) <= 60
    assert len(taken) <= 30 + now_s * 30 / 60


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_a_limit_that_is_no_positive_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"`tokens_per_minute` is `.*`; it must be a whole number above 0"):
        KeyLimits.of({"tenant": "acme", "tokens_per_minute": value})


def test_a_change_of_the_key_file_keeps_its_limits(tmp_path: Path) -> None:
    path, digest = tmp_path / "keys.yaml", digest_of("k")
    path.write_text(f"{digest}: {{tenant: acme, requests_per_minute: 60, max_tokens: 100}}")
    with changed_owners(path) as owners:
        owners[digest_of("new")] = KeyOwner("other")
    assert read_owners(path)[digest].limits == KeyLimits(requests_per_minute=60, max_tokens=100)


def test_a_wrong_limit_in_a_key_file_names_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{digest_of('k')}: {{tenant: acme, max_tokens: many}}")
    with pytest.raises(ValueError, match="tenant `acme`: `max_tokens` is `many`"):
        read_owners(path)
