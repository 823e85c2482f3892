"""docs/metrics.md lists every metric, with its type, its labels and its name at Ray's exporter."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.metrics_page import MetricRow, page, sections
from testkit.whole_metrics import whole_metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


@pytest.fixture
async def rows() -> dict[str, MetricRow]:
    return {row.name: row for of_part in (await sections()).values() for row in of_part}


async def test_docs_metrics_is_generated_from_the_code() -> None:
    assert PAGE.read_text() == await page(), "python -m testkit.metrics_page > docs/metrics.md"


async def test_every_family_of_the_page_has_a_row(rows: dict[str, MetricRow]) -> None:
    families = list(text_string_to_metric_families((await whole_metrics()).page()))
    shown = {each.name + "_total" * (each.type == "counter"): each for each in families}
    shown = {name: family for name, family in shown.items() if not name.endswith("_created")}
    assert rows.keys() == shown.keys()
    for name, family in shown.items():
        labels = {label for sample in family.samples for label in sample.labels if label not in ("le", "quantile")}
        assert (rows[name].kind, set(rows[name].labels)) == (family.type, labels)


async def test_a_row_says_where_and_in_which_unit(rows: dict[str, MetricRow]) -> None:
    assert rows["vllm:generation_tokens_total"].name_at_ray == "ray_vllm_generation_tokens_total"
    assert rows["headway:jobs"].name_at_ray == "ray_headway_jobs"
    assert rows["vllm:inter_token_latency_seconds"].name_at_ray is None
    units = {"vllm:kv_cache_usage_perc": "share, 0 to 1", "http_response_size_bytes": "bytes", "headway:jobs": "1"}
    assert {name: rows[name].unit for name in units} == units
    assert all(row.meaning.rstrip(".") for row in rows.values())
