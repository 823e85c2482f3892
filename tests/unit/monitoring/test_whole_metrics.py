"""Values of the page's metrics after one event of each kind."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.whole_metrics import whole_metrics


@pytest.fixture
async def samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families((await whole_metrics()).page())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


async def test_queues_are_counted_in_requests_tokens_and_tenants(
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float],
) -> None:
    def value(name: str, **labels: str) -> float | None:
        return samples.get((name, frozenset(labels.items())))

    assert value("headway:queue_size", band="standard", tenant="anonymous") == 1
    assert value("headway:queue_tokens", band="standard") == 7
    assert [value("headway:queue_tenants", band=band) for band in ("interactive", "standard", "batch")] == [0, 1, 0]
