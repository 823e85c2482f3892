"""Room on a replica by late binding: places by slots and urgency, and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.protocol import Band
from router.slots import LateBinding
from tests.unit.router.fakes import BLOCK_SIZE, request, stats, view

INTERACTIVE, STANDARD, BATCH = Band
LATE = LateBinding()
NONE: frozenset[Band] = frozenset()


def places(slots: LateBinding, of, band, *, starved=NONE, is_only=False) -> int:
    return slots.places(of, band, starved, is_only)


@pytest.mark.parametrize(
    ("by_band", "expected"),
    [((0, 0, 0), (8, 8, 8)), ((3, 2, 1), (5, 3, 2)), ((8, 0, 0), (0, 0, 0)), ((0, 0, 8), (8, 8, 0))],
)
def test_a_slot_of_a_lower_band_is_free_for_a_higher_one(by_band, expected):
    of = view(by_band=by_band, of=stats(slots=8))
    without_batch = LateBinding(batch_lookahead=0.0)
    urgent = tuple(places(LATE, of, band) for band in (INTERACTIVE, STANDARD))
    assert urgent == expected[:2]
    assert places(without_batch, of, BATCH) == expected[2] + 1, "batch work has one place beyond the slots"


def test_a_draining_replica_has_no_place_whoever_starves():
    of = view(of=stats(slots=8, is_draining=True, running=(0, 3, 0)))
    for band in Band:
        assert places(LateBinding(lookahead=4), of, band, starved=frozenset(Band), is_only=True) == 0


@pytest.mark.parametrize(("num_slots", "expected"), [(1, 1), (7, 1), (16, 2), (80, 10)])
def test_batch_work_looks_ahead_by_a_share_of_the_slots(num_slots, expected):
    of = view(by_band=(0, 0, num_slots), of=stats(slots=num_slots))
    assert places(LATE, of, BATCH) == expected
    assert places(LATE, of, STANDARD) == num_slots


def test_urgent_work_looks_ahead_only_where_less_urgent_work_runs_or_there_is_no_other():
    slots = LateBinding(lookahead=2)
    alone = view(by_band=(0, 4, 0), of=stats(slots=4))
    assert places(slots, alone, STANDARD) == 0
    assert places(slots, alone, STANDARD, is_only=True) == 2
    assert places(slots, alone, INTERACTIVE) == 6, "its four slots, and two ahead, since standard work runs there"
    beside_batch = view(by_band=(0, 3, 1), of=stats(slots=4))
    assert places(slots, beside_batch, STANDARD) == 3


@pytest.mark.parametrize("band", [STANDARD, BATCH])
def test_a_starved_band_has_the_places_of_the_most_urgent_one(band):
    slots, of = LateBinding(lookahead=1), view(by_band=(2, 2, 0), of=stats(slots=4))
    assert places(slots, of, band, starved=frozenset({band})) == 3
    full = view(by_band=(4, 0, 0), of=stats(slots=4))
    assert places(slots, full, band, starved=frozenset({band})) == 1, "first in line for the next slot"


def test_a_replica_that_others_fill_has_one_place():
    kept = view(by_band=(0, 4, 0), of=stats(slots=4, running=(0, 4, 0)))
    assert places(LATE, kept, STANDARD) == 1
    ours = replace(kept, own_by_band=(0, 1, 0))
    assert places(LATE, ours, STANDARD) == 0
    assert places(LATE, kept, BATCH) == 1


def test_a_request_needs_blocks_that_are_free_or_held_by_lower_bands():
    of = view(by_band=(0, 1, 0), of=stats(free_blocks=2, held=(0, 3, 5)))
    for band, num_blocks in ((INTERACTIVE, 10), (STANDARD, 7), (BATCH, 2)):
        fits, too_long = (
            request(prompt=(1,) * (BLOCK_SIZE * count), band=band) for count in (num_blocks, num_blocks + 1)
        )
        assert LATE.has_blocks(of, fits, NONE)
        assert not LATE.has_blocks(of, too_long, NONE)


def test_output_given_before_needs_blocks_too():
    of = view(by_band=(0, 1, 0), of=stats(free_blocks=1))
    moved = replace(request(prompt=(1,) * BLOCK_SIZE), output_token_ids=(2,))
    assert not LATE.has_blocks(of, moved, NONE)


def test_blocks_do_not_hold_back_the_first_a_promoted_one_or_what_others_keep_out():
    too_long = request(prompt=(1,) * 100 * BLOCK_SIZE)
    full = stats(free_blocks=1)
    assert LATE.has_blocks(view(of=full), too_long, NONE), "the empty replica refuses what never fits"
    busy = view(by_band=(0, 1, 0), of=full)
    assert not LATE.has_blocks(busy, too_long, NONE)
    assert LATE.has_blocks(busy, too_long, frozenset({STANDARD}))
    kept = view(by_band=(0, 1, 0), of=stats(free_blocks=1, running=(0, 1, 0)))
    assert LATE.has_blocks(kept, too_long, NONE)


def test_where_it_starts_at_once_comes_before_where_it_waits():
    full, idle = view("full", by_band=(0, 4, 0), of=stats(slots=4)), view("idle", of=stats(slots=4))
    assert LATE.best([full, idle], STANDARD) == [idle]
    assert LATE.best([full], STANDARD) == [full]
    assert LATE.best([full, idle], INTERACTIVE) == [full, idle], "standard work makes room for it"
