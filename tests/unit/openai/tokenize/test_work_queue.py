"""Order and bounds of the work before flow control."""

import random
from collections import Counter

import pytest

from replicas.errors import Overloaded
from replicas.protocol import Band
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.tokenize.work_queue import QueuedWork, WorkLimits, WorkQueue


def work_of(tenant: str, band: Band = Band.STANDARD, num_bytes: int = 0) -> QueuedWork:
    return QueuedWork(lambda: None, WorkOwner(band, tenant), num_bytes)


def taken(queue: WorkQueue, now_s: float = 0.0) -> list[QueuedWork]:
    found = []
    while (work := queue.take(tuple(Band), now_s)) is not None:
        found.append(work)
        queue.charge(work.owner, 1.0)
    return found


def test_an_urgent_band_comes_first() -> None:
    queue = WorkQueue(WorkLimits())
    for band in reversed(Band):
        queue.add(work_of("a", band), 0.0)
    assert [work.owner.band for work in taken(queue)] == sorted(Band)


def test_a_tenant_with_much_waiting_work_lets_others_in_between() -> None:
    queue = WorkQueue(WorkLimits())
    for _ in range(20):
        queue.add(work_of("flood"), 0.0)
    for _ in range(3):
        queue.add(work_of("idle"), 0.0)
    assert Counter(work.owner.tenant for work in taken(queue)[:7])["idle"] == 3


def test_turns_are_fair_by_the_time_that_work_takes() -> None:
    queue = WorkQueue(WorkLimits())
    for _ in range(40):
        for tenant in ("slow", "quick"):
            queue.add(work_of(tenant), 0.0)
    turns: Counter[str] = Counter()
    for _ in range(40):
        work = queue.take(tuple(Band), 0.0)
        assert work is not None
        turns[work.owner.tenant] += 1
        queue.charge(work.owner, 3.0 if work.owner.tenant == "slow" else 1.0)
    assert turns == {"quick": 30, "slow": 10}


def test_idle_time_earns_no_credit() -> None:
    queue = WorkQueue(WorkLimits())
    for _ in range(30):
        queue.add(work_of("old"), 0.0)
    for _ in range(10):
        assert queue.take(tuple(Band), 0.0) is not None
        queue.charge(WorkOwner(Band.STANDARD, "old"), 1.0)
    for _ in range(20):
        queue.add(work_of("new"), 0.0)
    assert Counter(work.owner.tenant for work in taken(queue)[:20])["old"] >= 9


def test_a_band_that_waits_too_long_has_one_turn() -> None:
    queue = WorkQueue(WorkLimits(promote_after_s=5.0))
    for _ in range(2):
        queue.add(work_of("a", Band.BATCH), 0.0)
        queue.add(work_of("b", Band.INTERACTIVE), 0.0)
    first, second = queue.take(tuple(Band), 1.0), queue.take(tuple(Band), 5.0)
    third = queue.take(tuple(Band), 5.5)
    assert first and second and third
    bands = [work.owner.band for work in (first, second, third)]
    assert bands == [Band.INTERACTIVE, Band.BATCH, Band.INTERACTIVE]


@pytest.mark.parametrize(
    ("limits", "num_bytes", "reason", "words"),
    [
        (WorkLimits(max_queued=3), 0, "max_queued_preparations", "3 pieces of batch requests wait"),
        (WorkLimits(max_queued_bytes=30), 10, "max_queued_preparation_bytes", "the limit is 30"),
        (WorkLimits(6, max_tenant_share=0.5), 0, "max_tenant_queued_preparations", "this tenant's batch requests"),
        (
            WorkLimits(9, 60, max_tenant_share=0.5),
            10,
            "max_tenant_queued_preparations_bytes",
            "30 bytes of this tenant's",
        ),
    ],
)
def test_a_full_queue_says_which_limit(limits: WorkLimits, num_bytes: int, reason: str, words: str) -> None:
    queue = WorkQueue(limits)
    for _ in range(3):
        queue.add(work_of("a", Band.BATCH, num_bytes), 0.0)
    with pytest.raises(Overloaded, match=words) as caught:
        queue.add(work_of("a", Band.BATCH, num_bytes), 0.0)
    assert caught.value.reason == reason
    queue.add(work_of("a", Band.INTERACTIVE), 0.0)  # Other bands have their own room,
    if limits.max_tenant_share < 1.0:
        queue.add(work_of("b", Band.BATCH, num_bytes), 0.0)  # and other tenants theirs.


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    queue, waiting, now_s = WorkQueue(WorkLimits(8, 100, 0.5)), set[QueuedWork](), 0.0
    for _ in range(300):
        now_s += rng.random()
        action = rng.random()
        if action < 0.5:
            work = work_of(f"tenant-{rng.randrange(2000)}", rng.choice(list(Band)), rng.randrange(40))
            try:
                queue.add(work, now_s)
                waiting.add(work)
            except Overloaded:
                pass
        elif action < 0.8:
            taken_work = queue.take(rng.sample(list(Band), 2), now_s)
            if taken_work is not None:
                waiting.remove(taken_work)
                queue.charge(taken_work.owner, rng.random())
        elif waiting:
            work = rng.choice(sorted(waiting, key=id))
            assert queue.remove(work)
            assert not queue.remove(work)
            waiting.remove(work)
        queue.check_invariants()
        assert len(queue) == len(waiting)
    assert set(taken(queue, now_s)) == waiting


def test_tenants_that_are_idle_are_forgotten() -> None:
    queue = WorkQueue(WorkLimits())
    for number in range(5000):
        queue.add(work_of(f"tenant-{number}"), 0.0)
        taken(queue)
    queue.check_invariants()
