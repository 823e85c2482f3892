"""Limits of API keys over several ingresses, which exchange their use."""

import pickle
import random
from collections.abc import Sequence

import pytest

import serve_app.keys.key_exchange as module
from replicas.errors import NoReplicaAvailable, Overloaded
from serve_app.keys.key_exchange import KeyUseBoard, KeyUseExchange
from serve_app.keys.rate_limits import MAX_PEER_AGE_S, KeyLimiter, KeyLimits, KeyTotals, KeyUseReport
from testkit.engine.shadow_runner import FakeClock
from tests.seeds import Seeds

LIMIT = 60
LIMITS = KeyLimits(requests_per_minute=LIMIT, tokens_per_minute=100 * LIMIT)


class Ingress:
    """Limiter of one ingress, with its side of the exchange over a board."""

    def __init__(self, name: str, clock: FakeClock, board: KeyUseBoard) -> None:
        self.board: KeyUseBoard | None = board
        self.limiter = KeyLimiter(clock.clock().monotonic)
        self.exchange = KeyUseExchange(self.limiter, name, self._publish)
        self.num_accepted = 0

    async def _publish(self, report: KeyUseReport) -> Sequence[KeyUseReport]:
        if self.board is None:
            raise NoReplicaAvailable("no model replica is running yet")
        return self.board.publish(report)

    def ask(self, count: int = 1, key_id: str = "k", num_tokens: int = 0) -> int:
        """Send so many requests; return the number of those that are accepted."""
        before = self.num_accepted
        for _ in range(count):
            use = self.limiter.use_of(key_id, LIMITS)
            assert use is not None
            try:
                use.begin()
                use.charge(num_tokens)
                self.num_accepted += 1
            except Overloaded:
                pass
            use.end()
        return self.num_accepted - before

    def num_left(self, key_id: str = "k") -> int:
        use = self.limiter.use_of(key_id, LIMITS)
        assert use is not None
        requests = use.requests()
        assert requests is not None
        return requests.num_left


class Ingresses:
    """Ingresses that meet at one board."""

    def __init__(self, number: int) -> None:
        self.clock = FakeClock()
        self.board = KeyUseBoard(self.clock.clock().monotonic)
        self.all = [Ingress(f"ingress-{each}", self.clock, self.board) for each in range(number)]

    def add(self, name: str) -> Ingress:
        self.all.append(Ingress(name, self.clock, self.board))
        return self.all[-1]

    async def exchange(self, rounds: int = 2) -> None:
        """Let all exchange. After two rounds each has heard what the others used before the first."""
        for _ in range(rounds):
            for ingress in self.all:
                await ingress.exchange.once()


async def test_what_others_used_is_taken_here() -> None:
    world = Ingresses(3)
    a, b, c = world.all
    assert (a.ask(20), b.ask(30)) == (20, 30)
    await world.exchange()
    assert [each.num_left() for each in world.all] == [10, 10, 10]
    assert (c.ask(99), a.ask(5)) == (10, 5), "use within one period is not known to the others"
    await world.exchange()
    world.clock.now += 4.9
    assert [each.ask() for each in world.all] == [0, 0, 0], "what was used too much is made up for"
    world.clock.now += 1.2
    assert [each.ask() for each in world.all] == [1, 1, 1]


async def test_tokens_are_shared_like_requests() -> None:
    world = Ingresses(2)
    a, b = world.all
    assert a.ask(2, num_tokens=2500) == 2 and b.ask(num_tokens=3000) == 1
    await world.exchange()
    assert (a.ask(), b.ask()) == (0, 0)
    world.clock.now += 20.1
    assert (a.ask(), b.ask()) == (1, 1)


async def test_an_answer_that_was_heard_before_is_not_taken_again() -> None:
    world = Ingresses(2)
    a, b = world.all
    a.ask(10)
    for _ in range(5):
        await world.exchange()
        assert b.num_left() == 50


async def test_a_new_ingress_and_a_new_key_begin_with_what_others_have_left() -> None:
    world = Ingresses(2)
    for _ in range(2):
        world.all[0].ask(20)
        await world.exchange()
    world.all[0].ask(10, "other")
    await world.exchange()
    assert world.all[1].num_left("other") == 50
    new = world.add("new")
    await world.exchange()
    assert new.num_left() == 20 and [each.num_left() for each in world.all] == [20, 20, 20]
    new.ask(5)
    await world.exchange()
    assert [each.num_left() for each in world.all] == [15, 15, 15]


async def test_an_ingress_that_was_away_long_is_not_charged_for_what_has_been_filled_up() -> None:
    world = Ingresses(2)
    a, b = world.all
    a.ask()
    b.ask()
    await world.exchange()
    a.board = None
    for _ in range(300):
        world.clock.now += 1
        assert a.ask(5) >= 1 or a.num_left() == 0
        await world.exchange(1)
    assert a.num_accepted > 3 * LIMIT and b.num_left() == LIMIT
    a.board = world.board
    await world.exchange()
    assert b.num_left() == a.num_left() < 5
    world.clock.now += 60
    assert b.num_left() == LIMIT


async def test_after_a_gap_without_exchanges_a_key_is_not_charged_for_what_has_been_filled_up() -> None:
    world = Ingresses(2)
    for ingress in world.all:
        ingress.ask()
    await world.exchange()
    for ingress in world.all:
        ingress.board = None
    for _ in range(600):
        world.clock.now += 1
        assert [ingress.ask() for ingress in world.all] == [1, 1]
        await world.exchange(1)
    for ingress in world.all:
        ingress.board = world.board
    await world.exchange()
    assert [ingress.num_left() for ingress in world.all] == [58, 58]


async def test_in_a_gap_without_exchanges_a_new_key_begins_unused() -> None:
    world = Ingresses(2)
    a, b = world.all
    a.ask(LIMIT, "other")
    await world.exchange()
    world.clock.now += MAX_PEER_AGE_S + 1
    assert b.num_left("other") == LIMIT


def test_a_replica_hands_reports_on_unread() -> None:
    board = KeyUseBoard(FakeClock().clock().monotonic)
    board.publish(KeyUseReport("a", 1, b"unreadable"))
    totals = [KeyTotals("k", 1, 2, 3.0, None)]
    report = KeyUseReport.of("b", 1, totals)
    assert [each.packed for each in board.publish(report)] == [b"unreadable"]
    assert b"KeyTotals" not in pickle.dumps(report) and report.totals() == totals


async def test_the_use_of_a_dead_ingress_is_filled_up_and_its_report_forgotten() -> None:
    world = Ingresses(2)
    dead, alive = world.all
    alive.ask()
    dead.ask(LIMIT)
    await world.exchange()
    world.all.remove(dead)
    assert alive.ask(5) == 0
    for _ in range(2 * int(MAX_PEER_AGE_S) + 2):
        world.clock.now += 1
        await world.exchange(1)
    assert not alive.limiter._peers and alive.num_left() == 21


async def test_an_older_report_from_another_board_changes_nothing() -> None:
    world = Ingresses(2)
    a, b = world.all
    a.ask(10)
    await world.exchange()
    old, world.board = world.board, KeyUseBoard(world.clock.clock().monotonic)
    a.board = b.board = world.board
    a.ask(10)
    await world.exchange()
    b.board = old
    await world.exchange(1)
    assert b.num_left() == 40
    b.board = world.board
    await world.exchange()
    assert b.num_left() == 40


async def test_what_is_kept_and_sent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.keys.rate_limits._MAX_USES", 20)
    monkeypatch.setattr("serve_app.keys.rate_limits._MAX_REPORTED", 10)
    monkeypatch.setattr(module, "_MAX_INGRESSES", 3)
    world = Ingresses(6)
    first = world.all[0]
    open_use = first.limiter.use_of("open", LIMITS)
    assert open_use is not None
    open_use.begin()
    for number in range(50):
        first.ask(1, f"key-{number}")
    await world.exchange()
    assert len(world.board._reports) == 3
    assert [totals.key_id for totals in first.limiter.totals()] == [f"key-{number}" for number in range(49, 39, -1)]
    assert len(first.limiter._uses) == 20 and first.limiter.use_of("open", LIMITS) is open_use
    world.clock.now += 121
    assert first.limiter.totals() == ()


@pytest.mark.random_worlds(30, per_call=10)
async def test_all_ingresses_together_keep_a_limit_but_for_what_they_have_not_heard(seeds: Seeds) -> None:
    for seed in seeds:
        rng, world = random.Random(seed), Ingresses(random.Random(seed).choice([1, 2, 4, 8]))
        accepted = list[int]()
        for _ in range(200):
            world.clock.now += 1.0
            in_period = sum(ingress.ask(rng.choice([0, 0, 1, 3, 30])) for ingress in world.all)
            accepted.append(in_period)
            rng.shuffle(world.all)
            for ingress in world.all:  # Some miss an exchange.
                if rng.random() < 0.9:
                    await ingress.exchange.once()
        # Beyond the limit at most what all accepted in three periods, before they had heard of each other.
        unheard = max(sum(accepted[start : start + 3]) for start in range(len(accepted)))
        num_limited = LIMIT * (1 + 200 / 60)
        assert sum(accepted) <= num_limited + unheard
        await world.exchange()
        levels = [ingress.num_left() for ingress in world.all]
        # Where a bucket was full, it has not been filled while another ingress's use was on its way.
        assert max(levels) - min(levels) <= 5 * LIMIT / 60
