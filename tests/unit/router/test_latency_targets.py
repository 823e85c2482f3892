"""Which requests were in time."""

from __future__ import annotations

import pytest

from router.latency_targets import LatencyTargets, Slo

TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1)


@pytest.mark.parametrize(
    ("ttft_s", "duration_s", "num_tokens", "attained"),
    [
        (1.0, 2.0, 11, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (1.01, 2.0, 11, [Slo.TPOT]),
        (1.0, 2.01, 11, [Slo.TTFT]),
        (1.5, 4.0, 11, []),
        (0.5, 9.0, 1, [Slo.TTFT, Slo.TPOT, Slo.ALL]),  # one token has no time between
        (0.5, 9.0, 0, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (None, 9.0, 0, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
    ],
)
def test_each_target_and_all(ttft_s, duration_s, num_tokens, attained):
    assert TARGETS.attained(ttft_s, duration_s, num_tokens) == attained


def test_what_has_no_target_is_always_in_time():
    assert LatencyTargets().attained(500.0, 90_000.0, 7) == [Slo.TTFT, Slo.TPOT, Slo.ALL]
    assert LatencyTargets(tpot_s=0.1).attained(500.0, 501.0, 11) == [Slo.TTFT, Slo.TPOT, Slo.ALL]
    assert LatencyTargets(tpot_s=0.1).attained(500.0, 502.0, 11) == [Slo.TTFT]
