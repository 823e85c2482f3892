"""The Grafana dashboard asks for nothing that /metrics does not show."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.whole_metrics import whole_metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "serve_app" / "dashboard" / "grafana.json").read_text())
METRIC = re.compile(r"\b(?:vllm|headway):\w+|\bhttp_\w+")
LABELS = re.compile(r"\b(?:by|on) \(([^)]*)\)|\{([^}]*)\}")

Target = dict[str, Any]


@pytest.fixture
async def labels_of() -> dict[str, set[str]]:
    """Return the label names of every sample's name on the page."""
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families((await whole_metrics()).page()):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return labels


def targets() -> list[Target]:
    return [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def labels_in(expr: str) -> set[str]:
    """Return the names of the labels that an expression groups or selects by."""
    return {
        re.split(r"[=!]", item)[0].strip()
        for match in LABELS.finditer(expr)
        for item in (match[1] or match[2] or "").split(",")
        if item
    }


def test_every_panel_asks_for_something() -> None:
    assert all(panel["targets"] for panel in DASHBOARD["panels"] if panel["type"] != "row")
    assert all(METRIC.search(target["expr"]) for target in targets())


async def test_every_metric_is_on_the_page(labels_of: dict[str, set[str]]) -> None:
    asked = {name for target in targets() for name in METRIC.findall(target["expr"])}
    assert asked - labels_of.keys() == set()
    assert len(asked) > 20


async def test_every_label_is_one_that_the_metrics_have(labels_of: dict[str, set[str]]) -> None:
    for target in targets():
        known = set().union(*(labels_of[name] for name in METRIC.findall(target["expr"])))
        assert labels_in(target["expr"]) <= known, target["expr"]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= labels_in(target["expr"]), "a legend can only show what the expression keeps"


def test_every_query_goes_to_the_data_source_that_is_chosen() -> None:
    [variable] = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert all(part["datasource"] == chosen for part in [*panels, *targets()])


def test_panels_neither_overlap_nor_share_an_id() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


async def test_the_whole_page_has_each_family_once() -> None:
    types = [line.split()[2] for line in (await whole_metrics()).page().splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == sorted(set(types))
