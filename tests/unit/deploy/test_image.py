"""The image: its context is the service alone, and its steps install it into an empty environment."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
INSTALL_LIMIT_S = 1800.0


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile in order, each with its words on one line."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def context() -> list[str]:
    """Files of the repository that the patterns of .dockerignore leave in the context; the last match counts."""
    patterns = [line for line in IGNORED.splitlines() if line and not line.startswith("#")]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    def is_in(name: str) -> bool:
        parents = [str(path) for path in (Path(name), *Path(name).parents)]
        matches = [p for p in patterns if any(fnmatch.fnmatchcase(each, p.lstrip("!")) for each in parents)]
        return not matches or matches[-1].startswith("!")

    return [name for name in tracked if is_in(name) and (ROOT / name).is_file()]


def test_the_context_is_the_service_alone() -> None:
    files = context()
    assert {name.split("/")[0] for name in files} == {
        *("headway", "serve_app", "router", "replicas"),
        *("pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
    }
    assert "serve_app/app.py" in files and "replicas/demo/config.json" in files


def test_the_image_has_the_versions_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    [torch] = re.findall(r"\btorch==\S+", DOCKERFILE)
    [ray] = re.findall(r"rayproject/ray:([\d.]+)-py311-gpu", DOCKERFILE)
    assert torch in constraints and f"ray=={ray}" in constraints


@pytest.mark.deep
def test_the_steps_install_a_service_into_an_empty_environment(tmp_path: Path) -> None:
    """It replays the steps that root does not do, in an environment that holds pip alone, as far as the files go."""
    home, environment = tmp_path / "home" / "ray", tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"HOME": str(home), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    folder, user = home, "ray"
    for name, argument in instructions():
        local = argument.replace("/home/ray", str(home))
        if name == "ARG":
            variables.setdefault(*argument.split("=", 1))
        elif name == "USER":
            user = argument
        elif name == "WORKDIR":
            folder = Path(local)
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            assert local.split()[-2:] == [".", "."]
            for file in context():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, folder / file)
        elif name == "RUN" and user != "root":
            subprocess.run(["sh", "-ec", local], cwd=folder, env=variables, check=True, timeout=INSTALL_LIMIT_S)
    command = ["headway", "grafana", str(home / "dashboards")]
    subprocess.run(command, cwd=home, env=variables, check=True, timeout=LIMIT_S)
    assert (home / "dashboards" / "headway.json").is_file()
    code = "import headway; print(headway.__file__)"
    printed = subprocess.run(
        ["python", "-c", code], cwd=home, env=variables, check=True, capture_output=True, text=True
    )
    assert printed.stdout.startswith(str(environment))
