"""docs/performance.md is what its generator makes of results of commits in the history."""

import json
import re
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from bench.performance_page import SECTIONS, page
from bench.record import RESULTS
from serve_app.cli.main import app
from testkit.limits import LIMIT_S

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "performance.md"
WITH_CHANGES = {"graphs of steps with prompts up to 2,048 tokens"}
"""Changes that were on `main` soon after they were measured."""
NAMES = [name for section in SECTIONS for name in section.names]


def test_the_document_is_made_from_the_results() -> None:
    assert DOCUMENT.read_text() == page(), "python -m bench.performance_page > docs/performance.md"


def test_every_table_names_its_origin() -> None:
    for name in NAMES:
        origin = next(line for line in page().splitlines() if line.endswith(f"; `{name}.json`"))
        assert re.search(r"^`(python -m bench\S* ?|by hand: ).*`; .+, \d+ cores; commit [0-9a-f]{9}", origin)


def test_every_row_that_a_table_names_is_in_it() -> None:
    for section in SECTIONS:
        for first_cell in section.shown:
            assert f"\n| {first_cell} |" in page(), section.question


def test_the_results_are_of_commits_in_the_history_without_unnamed_changes() -> None:
    for name in NAMES:
        environment = json.loads((RESULTS / f"{name}.json").read_text())["environment"]
        assert not environment["has_uncommitted_changes"] or environment["changes"] in WITH_CHANGES, name
        command = ["git", "merge-base", "--is-ancestor", environment["commit"], "HEAD"]
        assert subprocess.run(command, cwd=RESULTS, check=False, timeout=LIMIT_S).returncode == 0, name


def test_the_page_is_short() -> None:
    assert len(page().split()) <= 1500


def test_the_documented_options_exist() -> None:
    text = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["bench", "--help"]).stdout
    section = (DOCUMENT.parent / "commands.md").read_text().partition("\n## bench\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z-]+", section))
    assert named and named <= set(re.findall(r"--[a-z-]+", text)), named
