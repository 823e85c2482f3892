"""Times and tokens of a request, and the figures of many."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.benchmark.figures import figures_of
from serve_app.benchmark.rows import Outcome, Row, Targets, read_rows, write_rows


def row(*chunks: tuple[float, int], scheduled_s: float = 0.0, **changes: Any) -> Row:
    """Return a whole response whose chunks came at these times with so many tokens each."""
    made = Row(0, 10, sum(count for _, count in chunks), scheduled_s)
    fields = {
        "sent_s": scheduled_s, "end_s": chunks[-1][0] if chunks else scheduled_s, "status": 200,
        "finish_reason": "length", "chunk_s": [at_s for at_s, _ in chunks],
        "chunk_tokens": [count for _, count in chunks], "token_ids": [1] * made.num_output_tokens,
    }  # fmt: skip
    for name, value in {**fields, **changes}.items():
        setattr(made, name, value)
    return made


def test_a_gap_is_shared_by_the_tokens_of_its_chunk() -> None:
    counted = row((1.0, 1), (1.3, 3), (1.4, 1))
    assert counted.inter_token_s == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert counted.gaps_s == pytest.approx([0.3, 0.1])
    assert counted.tpot_s == pytest.approx(0.1)


def test_without_token_ids_the_usage_is_spread_over_the_chunks() -> None:
    spread = row((1.0, 1), (1.3, 1), (1.4, 1), token_ids=[], usage_output_tokens=6)
    assert spread.num_tokens == 6
    assert spread.tokens_by_chunk == [2.0, 2.0, 2.0]
    assert spread.inter_token_s == pytest.approx([0.15, 0.15, 0.05, 0.05])
    assert spread.tpot_s == pytest.approx(0.1)


def test_a_broken_stream_counts_its_chunks() -> None:
    broken = row((1.0, 1), (1.3, 1), token_ids=[], error_code="client:TimeoutError")
    assert (broken.num_tokens, broken.outcome.value) == (2, "failed")


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.OK),
        ({"finish_reason": "stop"}, Outcome.OK),
        ({"finish_reason": None}, Outcome.TRUNCATED),
        ({"finish_reason": None, "error_code": "replica_lost"}, Outcome.STREAM_ERROR),
        ({"finish_reason": None, "error_code": "client:ClientPayloadError"}, Outcome.FAILED),
        ({"status": 429, "error_code": "server_overloaded"}, Outcome.REFUSED),
        ({"status": 504}, Outcome.SERVER_ERROR),
        ({"status": 400}, Outcome.CLIENT_ERROR),
        ({"status": None, "error_code": "client:TimeoutError"}, Outcome.FAILED),
        ({"is_cut_off": True}, Outcome.CUT_OFF),
    ],
)
def test_outcomes(changes: dict[str, Any], outcome: Outcome) -> None:
    assert row((0.1, 1), **changes).outcome is outcome


def test_goodput_counts_whole_responses_within_both_targets() -> None:
    rows = [
        row((0.1, 1), (0.2, 1)),
        row((0.3, 1), (0.4, 1)),  # late first token
        row((0.1, 1), (0.4, 1)),  # slow
        row((0.1, 1), (0.2, 1), finish_reason=None),  # truncated
        row((0.1, 4)),  # one chunk has no gap to miss the target with
    ]
    figures = figures_of(rows, Targets(ttft_ms=250.0, itl_ms=150.0))
    assert (figures.num_good, figures.num_ok, figures.num_failed) == (2, 4, 1)
    assert figures.duration_s == pytest.approx(0.4)
    assert figures.goodput_tokens_per_s == pytest.approx(6 / 0.4)
    assert figures.output_tokens_per_s == pytest.approx(12 / 0.4)


def test_failures_are_counted_by_status_and_code() -> None:
    refused: dict[str, Any] = {"status": 429, "error_code": "server_overloaded", "finish_reason": None}
    lost: dict[str, Any] = {"status": None, "error_code": "client:ClientConnectorError", "finish_reason": None}
    rows = [row(**refused), row(**refused), row(**lost), row(is_cut_off=True), row(sent_s=None)]
    figures = figures_of(rows, Targets())
    assert figures.errors == {"429 server_overloaded": 2, "ClientConnectorError": 1}
    assert (figures.num_requests, figures.num_failed, figures.num_cut_off, figures.ttft_ms) == (4, 3, 1, None)


def test_times_count_from_the_schedule_and_lateness_is_reported() -> None:
    figures = figures_of([row((1.5, 1), (1.6, 1), scheduled_s=1.0, sent_s=1.2)], Targets())
    assert figures.ttft_ms is not None and figures.lateness_ms is not None and figures.total_ms is not None
    assert (figures.ttft_ms.p50, figures.total_ms.p50) == pytest.approx((500.0, 600.0))
    assert figures.lateness_ms.max == pytest.approx(200.0)


def test_nothing_sent_gives_figures_without_times() -> None:
    figures = figures_of([], Targets())
    assert (figures.num_requests, figures.ttft_ms, figures.output_tokens_per_s) == (0, None, 0.0)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [row((0.1, 1), (0.2, 3))]
    write_rows(tmp_path / "rows", rows)
    assert read_rows(tmp_path / "rows") == rows
