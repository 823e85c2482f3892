"""Each commit plays other random worlds, and every one can be played again."""

import os
import re
import subprocess
import sys
from pathlib import Path

from testkit.limits import LIMIT_S
from tests.seeds import groups

ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import pytest

@pytest.mark.random_worlds(6, per_call=3)
def test_seeds_below_two(seeds):
    for seed in seeds:
        print("played", seed)
        assert seed < 2
"""


SLOW = """
import pytest

@pytest.mark.deep
def test_slow():
    pass
"""


SAMPLED = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(10))
def test_case(case):
    print(f"case <{case}>")
"""


ROTATED = """
import pytest

pytestmark = pytest.mark.rotated

def test_module():
    print(f"module <{__name__[-1]}>")
"""


def played(commit: str | None, is_deep: bool = False) -> set[int]:
    return {seed for seeds in groups(240, 10, "test", commit, is_deep).values() for seed in seeds}


def run(folder: Path, tests: str, *options: str) -> str:
    (folder / "test_worlds.py").write_text(tests)
    return run_folder(folder, str(folder), *options)


def run_folder(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.seeds", "--rootdir", str(folder), *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.stdout


def test_a_commit_plays_a_twelfth_of_its_own() -> None:
    one, same, other = played("one"), played("one"), played("other")
    assert one == same
    assert not one & other
    assert len(one) == len(other) == 20


def test_all_are_played_on_demand() -> None:
    assert played("one", is_deep=True) == set(range(240)) | played("one")


def test_without_a_commit_the_first_ones_are_played() -> None:
    assert played(None) == set(range(20))


def test_a_failure_names_the_seed_that_plays_it_again(tmp_path: Path) -> None:
    report = run(tmp_path, FAILING, "--deep")
    assert "seed 2; to play it again:" in report
    assert "python -m pytest 'test_worlds.py::test_seeds_below_two' --seed 2" in report
    again = run(tmp_path, FAILING, "--seed", "2")
    assert "played 2" in again and "played 0" not in again and "1 failed" in again


def test_slow_tests_run_on_demand(tmp_path: Path) -> None:
    assert "1 deselected" in run(tmp_path, SLOW)
    assert "1 passed" in run(tmp_path, SLOW, "--deep")


def test_a_commit_plays_some_cases_of_a_sampled_test(tmp_path: Path) -> None:
    assert "3 passed, 7 deselected" in run(tmp_path, SAMPLED, "--commit", "one")
    assert "10 passed" in run(tmp_path, SAMPLED, "--deep")
    played = {run(tmp_path, SAMPLED, "--commit", commit, "-rP") for commit in ("one", "one", "other")}
    assert len({tuple(sorted(re.findall("case <[0-9]>", report))) for report in played}) == 2


def test_a_commit_plays_a_fifth_of_the_rotated_modules_of_a_kind(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text(ROTATED)
    folder = str(tmp_path)
    assert "5 passed" in run_folder(tmp_path, folder, "--deep")
    assert "5 passed" in run_folder(tmp_path, *(str(tmp_path / f"test_{number}.py") for number in range(5)))
    reports = [run_folder(tmp_path, folder, "--commit", commit, "-rP") for commit in ("one", "fourth")]
    assert all("1 passed, 4 deselected" in report for report in reports)
    assert len({tuple(re.findall("module <[0-9]>", report)) for report in reports}) == 2
