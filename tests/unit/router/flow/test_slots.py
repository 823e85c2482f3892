"""Room on a replica by late binding: places by slots and urgency, and blocks."""

from dataclasses import replace

import pytest

from replicas.protocol import Band, IngressShare
from router.balancing.load_table import LoadTable
from router.flow.slots import LateBinding
from testkit.router.simulated_replicas import BLOCK_SIZE, stats, view
from testkit.router.simulated_time import FakeClock

INTERACTIVE, STANDARD, BATCH = Band
LATE = LateBinding()
NONE: frozenset[Band] = frozenset()


def places(slots: LateBinding, of, band, *, starved=NONE, is_only=False) -> int:
    return slots.num_assignable(of, band, starved, is_only)


@pytest.mark.parametrize(
    ("by_band", "expected"),
    [((0, 0, 0), (8, 8, 8)), ((3, 2, 1), (5, 3, 2)), ((8, 0, 0), (0, 0, 0)), ((0, 0, 8), (8, 8, 0))],
)
def test_a_slot_of_a_lower_band_is_free_for_a_higher_one(by_band, expected):
    of = view(by_band=by_band, of=stats(slots=8))
    without_batch = LateBinding(batch_lookahead=0.0)
    assert tuple(places(LATE, of, band) for band in (INTERACTIVE, STANDARD)) == expected[:2]
    assert places(without_batch, of, BATCH) == expected[2] + 1, "batch work has one place beyond the slots"


def test_a_draining_replica_has_no_place_for_a_starved_band():
    of = view(of=stats(slots=8, is_draining=True, running=(0, 3, 0)))
    for band in Band:
        assert places(LateBinding(lookahead=4), of, band, starved=frozenset(Band), is_only=True) == 0


@pytest.mark.parametrize(("num_slots", "expected"), [(1, 1), (7, 1), (16, 2), (80, 10)])
def test_batch_work_looks_ahead_by_a_share_of_the_slots(num_slots, expected):
    of = view(by_band=(0, 0, num_slots), of=stats(slots=num_slots))
    assert places(LATE, of, BATCH) == expected
    assert places(LATE, of, STANDARD) == num_slots


@pytest.mark.parametrize("version", range(1, 6))
def test_ingresses_share_out_places_in_slots_and_beyond_them(version):
    shares = [IngressShare(name, (0, 0, 4), 0) for name in "abc"]
    report = replace(stats(slots=16, running=(0, 0, 12), by_ingress=shares), version=version)
    found = []
    for name in "abc":
        table = LoadTable(FakeClock(), name)
        for _ in range(4):
            table.begin("a", BATCH, 1, 1)
        table.record(report)
        found.append(places(LATE, table.load_of("a"), BATCH))
    assert sum(found) == 4 + 2 and min(found) >= 1


STANDARD_RUNS, BATCH_RUNS = view(by_band=(0, 4, 0), of=stats(slots=4)), view(by_band=(0, 3, 1), of=stats(slots=4))


@pytest.mark.parametrize(
    ("of", "band", "is_only", "expected"),
    [
        (STANDARD_RUNS, STANDARD, False, 0),
        (STANDARD_RUNS, STANDARD, True, 2),
        (STANDARD_RUNS, INTERACTIVE, False, 6),  # its four slots, and two ahead, since standard work runs there
        (BATCH_RUNS, STANDARD, False, 3),
    ],
)
def test_lookahead_needs_less_urgent_work_or_a_single_replica(of, band, is_only, expected):
    assert places(LateBinding(lookahead=2), of, band, is_only=is_only) == expected


@pytest.mark.parametrize("band", [STANDARD, BATCH])
@pytest.mark.parametrize(("by_band", "expected"), [((2, 2, 0), 3), ((4, 0, 0), 1)], ids=["slots", "next in line"])
def test_a_starved_band_has_the_places_of_the_most_urgent_one(band, by_band, expected):
    of = view(by_band=by_band, of=stats(slots=4))
    assert places(LateBinding(lookahead=1), of, band, starved=frozenset({band})) == expected


def test_a_replica_full_of_other_ingresses_work_has_one_place():
    kept = view(by_band=(0, 4, 0), of=stats(slots=4, running=(0, 4, 0)))
    assert [places(LATE, kept, band) for band in (STANDARD, BATCH)] == [1, 1]
    assert places(LATE, replace(kept, own_by_band=(0, 1, 0)), STANDARD) == 0


@pytest.mark.parametrize(("band", "num_blocks"), [(INTERACTIVE, 10), (STANDARD, 7), (BATCH, 2)])
def test_a_request_needs_free_or_preemptible_blocks(band, num_blocks):
    of = view(by_band=(0, 1, 0), of=stats(free_blocks=2, held=(0, 3, 5)))
    assert LATE.max_tokens(of, band, NONE) == BLOCK_SIZE * num_blocks


@pytest.mark.parametrize(
    ("by_band", "running", "starved", "has_blocks"),
    [
        ((0, 0, 0), (0, 0, 0), NONE, True),  # the empty replica refuses what never fits
        ((0, 1, 0), (0, 0, 0), NONE, False),
        ((0, 1, 0), (0, 0, 0), frozenset({STANDARD}), True),
        ((0, 1, 0), (0, 1, 0), NONE, True),
    ],
    ids=["empty", "busy", "promoted", "filled by others"],
)
def test_a_request_without_blocks_is_held_back_with_exceptions(by_band, running, starved, has_blocks):
    of = view(by_band=by_band, of=stats(free_blocks=1, running=running))
    assert (LATE.max_tokens(of, STANDARD, starved) > 100 * BLOCK_SIZE) is has_blocks


def test_a_replica_with_a_free_slot_comes_before_a_full_one():
    full, idle = view("full", by_band=(0, 4, 0), of=stats(slots=4)), view("idle", of=stats(slots=4))
    assert LATE.has_free_slot(idle, STANDARD) and not LATE.has_free_slot(full, STANDARD)
    assert LATE.has_free_slot(full, INTERACTIVE), "standard work makes room for it"
