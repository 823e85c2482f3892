"""Latency targets, and the requests that meet them."""

import pytest

from router.types import LatencyTargets, Slo

TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1)
NO_TTFT, NONE = LatencyTargets(tpot_s=0.1), LatencyTargets()


@pytest.mark.parametrize(
    ("targets", "ttft_s", "duration_s", "num_tokens", "attained"),
    [
        (TARGETS, 1.0, 2.0, 11, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (TARGETS, 1.01, 2.0, 11, [Slo.TPOT]),
        (TARGETS, 1.0, 2.01, 11, [Slo.TTFT]),
        (TARGETS, 1.5, 4.0, 11, []),
        (TARGETS, 0.5, 9.0, 1, [Slo.TTFT, Slo.TPOT, Slo.ALL]),  # one token has no time between
        (TARGETS, 0.5, 9.0, 0, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (TARGETS, None, 9.0, 0, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (NONE, 500.0, 90_000.0, 7, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (NO_TTFT, 500.0, 501.0, 11, [Slo.TTFT, Slo.TPOT, Slo.ALL]),
        (NO_TTFT, 500.0, 502.0, 11, [Slo.TTFT]),
    ],
)
def test_each_target_is_met_or_not_and_all_together(targets, ttft_s, duration_s, num_tokens, attained):
    assert targets.attained(ttft_s, duration_s, num_tokens) == attained
