"""The dashboards for Grafana ask for nothing that their sources do not show."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.monitoring.grafana import Source, dashboard
from testkit.recorded_ray import export_all
from testkit.whole_metrics import whole_metrics

METRIC = re.compile(r"\b(?:vllm|headway):\w+|\bray_(?:vllm|headway)_\w+")
LABELS = re.compile(r"\b(?:by|on) \(([^)]*)\)|\{([^}]*)\}")
OF_RAY = {"application", "deployment", "replica", "WorkerId", "le"}
BOTH = pytest.mark.parametrize("source", Source)

Target = dict[str, Any]


async def labels_of(source: Source) -> dict[str, set[str]]:
    """Return the label names of every sample's name that a source shows."""
    whole = await whole_metrics()
    labels: dict[str, set[str]] = defaultdict(set)
    if source is Source.RAY:
        ray = await export_all(whole)
        for name, keys in ray.tag_keys.items():
            labels |= {shown: {*keys, *OF_RAY} for shown in ray.names_of(name)}
        return labels
    for family in text_string_to_metric_families(whole.page()):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return labels


def targets(source: Source) -> list[Target]:
    return [target for panel in dashboard(source)["panels"] for target in panel.get("targets", ())]


def labels_in(expr: str) -> set[str]:
    """Return the names of the labels that an expression groups or selects by."""
    return {
        re.split(r"[=!]", item)[0].strip()
        for match in LABELS.finditer(expr)
        for item in (match[1] or match[2] or "").split(",")
        if item
    }


@BOTH
def test_every_panel_asks_for_something(source: Source) -> None:
    assert all(panel["targets"] for panel in dashboard(source)["panels"] if panel["type"] != "row")
    assert all(METRIC.search(target["expr"]) for target in targets(source))


@BOTH
async def test_every_metric_is_one_of_the_source(source: Source) -> None:
    asked = {name for target in targets(source) for name in METRIC.findall(target["expr"])}
    assert asked - (await labels_of(source)).keys() == set()
    assert len(asked) > 25


@BOTH
async def test_every_label_is_one_that_the_metrics_have(source: Source) -> None:
    shown_by_source = await labels_of(source)
    for target in targets(source):
        known = set().union(*(shown_by_source[name] for name in METRIC.findall(target["expr"])))
        assert labels_in(target["expr"]) <= known, target["expr"]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= labels_in(target["expr"]), "a legend can only show what the expression keeps"


@BOTH
def test_every_query_goes_to_the_data_source_that_is_chosen(source: Source) -> None:
    [variable] = dashboard(source)["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    panels = [panel for panel in dashboard(source)["panels"] if panel["type"] != "row"]
    assert all(part["datasource"] == chosen for part in [*panels, *targets(source)])


@BOTH
def test_panels_neither_overlap_nor_share_an_id(source: Source) -> None:
    panels = dashboard(source)["panels"]
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_command_writes_a_dashboard_for_each_source(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["grafana", str(tmp_path / "new")])
    assert (result.exit_code, result.stdout.split()) == (
        0,
        [f"{tmp_path}/new/headway{end}" for end in (".json", "_ray.json")],
    )
    written = {json.loads(Path(name).read_text())["uid"] for name in result.stdout.split()}
    assert written == {"headway", "headway-ray"}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["grafana", str(tmp_path / "file")])
    assert result.exit_code == 1 and f"{tmp_path}/file" in result.stderr


async def test_the_whole_page_has_each_family_once() -> None:
    types = [line.split()[2] for line in (await whole_metrics()).page().splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == sorted(set(types))
