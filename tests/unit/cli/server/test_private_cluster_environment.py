"""The environment in which Serve repairs itself within seconds under `headway serve`."""

from ray.serve._private.constants import PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD

from serve_app.cli.server.private_cluster import SERVE_ENVIRONMENT

MAX_NOTICE_S = 3.0
"""Half of the 6 s within which a killed proxy is back; the rest is the start of the new one."""


def test_a_killed_proxy_is_noticed_in_half_of_the_time_in_which_it_must_be_back() -> None:
    loop_s = float(SERVE_ENVIRONMENT["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"])
    period_s = float(SERVE_ENVIRONMENT["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"])
    # A check begins in a turn of the loop that comes a period after the last result, and ends in the turn after it.
    check_s = period_s + 2 * loop_s
    assert PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD * check_s <= MAX_NOTICE_S
