"""The application starts only if its packages come from one directory; the refusal names both files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import serve_app
from serve_app.cli.main import app
from serve_app.one_root import ForeignPackage, check_one_root
from testkit.limits import LIMIT_S

OWN = Path(serve_app.__file__).resolve()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return the file of a package in `tmp_path` that has the name of one of the application's."""
    file = tmp_path / "router" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    return file


def test_packages_in_one_directory_are_accepted(tmp_path: Path) -> None:
    check_one_root()
    check_one_root(tmp_path)
    check_one_root(OWN.parents[1])


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    check_one_root(tmp_path)


def test_a_package_in_the_working_directory_is_refused_with_both_files(foreign: Path) -> None:
    with pytest.raises(ForeignPackage) as refusal:
        check_one_root(foreign.parents[1])
    assert f"`router` is {foreign}, but `serve_app` is {OWN}" in str(refusal.value)


def test_a_module_in_the_working_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "replicas.py"
    file.write_text("")
    with pytest.raises(ForeignPackage, match=f"`replicas` is {file}, but"):
        check_one_root(tmp_path)


def test_the_application_is_not_built_beside_a_foreign_package(foreign: Path) -> None:
    """The working directory is first on the path, as with `serve run serve_app.app:build`."""
    path = os.pathsep.join([str(foreign.parents[1]), str(OWN.parents[1])])
    result = subprocess.run(
        [sys.executable, "-c", "import serve_app.app"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=foreign.parents[1],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert f"ForeignPackage: `router` is {foreign}, but `serve_app` is {OWN}" in result.stderr


def test_headway_serve_refuses_a_foreign_package_where_it_starts(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.parents[1])
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: `router` is {foreign}, but `serve_app` is {OWN}")
