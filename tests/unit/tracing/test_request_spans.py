"""Waits and placements of a sequence, as its trace shows them."""

from replicas.protocol import FinishReason, PhaseSeconds, TokenDelta, Usage
from router.timeline import Part, Timeline
from router.types import Reason
from serve_app.tracing.request_spans import stays


def delta(start: int, phases: PhaseSeconds | None = None, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", start, (1,), "a", Usage(3, start + 1, 0), finish_reason=finish, phases=phases)


def placed(first_s: float = 2.0) -> Timeline:
    """Return the timeline of a request on replica `a`, before its first delta."""
    timeline = Timeline(0.0)
    timeline.received(0.5)
    timeline.arrived(1.0)
    timeline.waited(first_s)
    timeline.placed(first_s, "a", Reason.LEAST_LOADED)
    return timeline


def lengths(timeline: Timeline) -> list[tuple[str | None, list[tuple[Part, float]]]]:
    """Return the replica, and the phases with their lengths, of each stay, after checking that nothing overlaps."""
    timeline.check_invariants()
    found = []
    end_s = 1.0
    for stay in stays(timeline):
        assert stay.times.start_s == end_s
        end_s = piece_s = stay.times.end_s
        if stay.phases:
            piece_s = stay.times.start_s
        for _, times in stay.phases:
            assert abs(times.start_s - piece_s) < 1e-9
            piece_s = times.end_s
        assert abs(piece_s - end_s) < 1e-9
        replica_id = None if stay.placement is None else stay.placement.replica_id
        found.append((replica_id, [(part, round(each.end_s - each.start_s, 3)) for part, each in stay.phases]))
    assert end_s == timeline.ended_s
    return found


def test_a_preemption_lies_between_two_pieces_of_decoding() -> None:
    timeline = placed()
    timeline.progressed(4.0, delta(0, PhaseSeconds(waiting_s=0.5, prefill_s=1.0)), "a")
    timeline.progressed(5.0, delta(1), "a")
    timeline.progressed(9.0, delta(2, PhaseSeconds(0.5, 2.0, 1.5, 2.0, num_preemptions=1)), "a")
    timeline.progressed(10.0, delta(3, PhaseSeconds(0.5, 2.0, 2.5, 2.0, 1), FinishReason.LENGTH), "a")
    timeline.ended(10.5)
    assert lengths(timeline) == [
        (None, []),
        (
            "a",
            [
                (Part.QUEUED_REPLICA, 0.5),
                (Part.PREFILL, 1.0),
                (Part.DELIVERED, 0.5),
                (Part.DECODE, 2.0),
                (Part.PREEMPTED, 2.0),
                (Part.PREFILL, 1.0),
                (Part.DECODE, 1.0),
                (Part.DELIVERED, 0.5),
            ],
        ),
    ]


def test_a_lost_replica_ends_in_migration_and_the_next_begins_with_it() -> None:
    timeline = placed()
    timeline.progressed(3.0, delta(0, PhaseSeconds(prefill_s=1.0)), "b")
    timeline.progressed(4.0, delta(1), "b")
    timeline.migrated(6.0)
    timeline.waited(6.5)
    timeline.placed(6.5, "c", Reason.LEAST_LOADED)
    timeline.progressed(8.0, delta(2, PhaseSeconds(waiting_s=0.5, prefill_s=1.0)), "c")
    timeline.ended(9.0)
    assert lengths(timeline) == [
        (None, []),
        ("b", [(Part.PREFILL, 1.0), (Part.DECODE, 1.0), (Part.MIGRATED, 2.0)]),
        (None, []),
        ("c", [(Part.QUEUED_REPLICA, 0.5), (Part.MIGRATED, 1.0), (Part.DECODE, 1.0)]),
    ]
    assert [stay.is_lost for stay in stays(timeline)] == [False, True, False, False]
    assert [dict(stay.reasons) for stay in stays(timeline)][::2] == [{Part.QUEUED_CAPACITY: s} for s in (1.0, 0.5)]


def test_a_refused_placement_is_waiting() -> None:
    timeline = placed()
    timeline.refused(2.5)
    timeline.waited(3.0)
    timeline.placed(3.0, "b", Reason.LEAST_LOADED)
    timeline.progressed(4.0, delta(0, PhaseSeconds(prefill_s=1.0), FinishReason.LENGTH), "b")
    timeline.ended(4.0)
    assert lengths(timeline) == [(None, []), ("b", [(Part.PREFILL, 1.0)])]


def test_a_stream_that_its_client_leaves_ends_in_decoding() -> None:
    timeline = placed()
    timeline.progressed(3.0, delta(0, PhaseSeconds(prefill_s=1.0)), "a")
    timeline.ended(5.0)
    assert lengths(timeline)[1] == ("a", [(Part.PREFILL, 1.0), (Part.DECODE, 2.0)])
