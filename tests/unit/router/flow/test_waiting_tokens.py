"""Sums over tenants equal those that visit each of them."""

import random

import pytest

import router.flow.waiting_tokens as module
from router.flow.waiting_tokens import LargestFirst, SummedKeys, TokensByTurn, WaitingTokens


@pytest.mark.parametrize("seed", range(10))
def test_sums_up_to_a_key_are_those_of_all_keys(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_BUCKET", 8)
    rng = random.Random(seed)
    keys = SummedKeys()
    entries: list[tuple[int, int]] = []
    for _ in range(500):
        if entries and rng.random() < 0.45:
            key, value = entries.pop(rng.randrange(len(entries)))
            keys.add(key, -value, -1)
        else:
            entries.append((rng.randrange(50), rng.randrange(-20, 20)))
            keys.add(*entries[-1])
        keys.check_invariants()
        assert len(keys) == len(entries)
        limit = rng.choice([rng.randrange(-1, 51), float("inf")])
        within = [value for key, value in entries if key <= limit]
        assert keys.up_to(limit) == (len(within), sum(within))


@pytest.mark.parametrize("seed", range(10))
def test_tokens_until_a_turn_are_those_of_each_tenant(seed: int):
    rng = random.Random(seed)
    waiting: dict[str, WaitingTokens] = {}
    for _ in range(200):
        name, first = f"tenant-{rng.randrange(60)}", rng.randrange(1, 100)
        if rng.random() < 0.3:
            waiting.pop(name, None)
        else:
            waiting[name] = WaitingTokens(rng.randrange(1000), first + rng.choice([0, rng.randrange(500)]), first)
        by_turn = TokensByTurn(waiting)
        turn, but = rng.randrange(-10, 1500), f"tenant-{rng.randrange(60)}"
        expected = sum(tokens.served_until(turn) for name, tokens in waiting.items() if name != but)
        assert by_turn.served_until(turn, but) == expected


def test_the_largest_come_first():
    rng, sizes, largest = random.Random(0), {}, LargestFirst()
    for _ in range(300):
        name, size = f"tenant-{rng.randrange(30)}", rng.randrange(5)
        sizes[name] = size
        largest.update(name, size)
        ordered = sorted((-size, name) for name, size in sizes.items() if size)
        assert list(largest.first(7).items()) == [(name, -size) for size, name in ordered[:7]]
