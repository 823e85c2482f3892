"""Refused requests are sent again when OpenAI's clients would send them."""

import random

import pytest

from serve_app.benchmark.retries import retry_delay_s


@pytest.mark.parametrize(
    ("status", "headers", "num_attempts", "shortest_s", "longest_s"),
    [
        *((status, {}, 1, 0.375, 0.5) for status in (408, 409, 429, 500, 503, None)),
        *((status, {}, 2, 0.75, 1.0) for status in (408, 409, 429, 500, 503, None)),
        (429, {"retry-after": "7"}, 1, 7.0, 7.0),
        (429, {"retry-after": "7", "retry-after-ms": "250"}, 1, 0.25, 0.25),
        (404, {"x-should-retry": "true", "retry-after": "2"}, 1, 2.0, 2.0),
    ],
)
def test_retries_come_when_those_of_the_sdk_do(
    status: int | None, headers: dict[str, str], num_attempts: int, shortest_s: float, longest_s: float
) -> None:
    delay_s = retry_delay_s(status, headers, num_attempts, random.Random(0))
    assert delay_s is not None and shortest_s <= delay_s <= longest_s


@pytest.mark.parametrize(
    ("status", "headers", "num_attempts"),
    [
        *((status, {}, 3) for status in (408, 409, 429, 500, 503, None)),
        *((status, {}, 1) for status in (400, 401, 404, 413, 422, 499)),
        (429, {"retry-after": "121"}, 1),
        (503, {"x-should-retry": "false"}, 1),
    ],
)
def test_the_sdk_gives_up(status: int | None, headers: dict[str, str], num_attempts: int) -> None:
    assert retry_delay_s(status, headers, num_attempts, random.Random(0)) is None
