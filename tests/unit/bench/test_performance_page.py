"""docs/performance.md is what its generator makes of the results, and its commands exist."""

import re
from pathlib import Path

from typer.testing import CliRunner

from bench.performance_page import SECTIONS, page
from bench.record import RESULTS
from serve_app.cli.main import app

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "performance.md"


def test_the_document_is_made_from_the_results() -> None:
    assert DOCUMENT.read_text() == page(), "python -m bench.performance_page > docs/performance.md"


def test_every_table_names_its_origin() -> None:
    for section in SECTIONS:
        assert (RESULTS / f"{section.name}.json").exists()
        [origin] = [line for line in page().splitlines() if line.endswith(f"· `{section.name}.json`")]
        assert re.search(r"^`python -m bench\S* ?.*` · .+, \d+ cores · commit [0-9a-f]{9}", origin)


def test_the_documented_options_exist() -> None:
    text = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["bench", "--help"]).stdout
    named = set(re.findall(r"--[a-z-]+", page().partition("\n## Other engines")[0]))
    assert named and named <= set(re.findall(r"--[a-z-]+", text)), named
