"""The commands of the documents work: every block runs, in the order of its document, against a real server."""

import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.http.python_programs import PythonPrograms, python_programs
from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
URL = "http://127.0.0.1:8000"
"""Address of the server in the documents."""
MODEL = "SmolLM2-135M-Instruct"
ELSEWHERE = {
    "make serve": "tests/ray/own/test_launcher.py",
    "headway serve": "tests/ray/own/test_launcher.py and tests/unit/cli",
    "make": "CI",
    "headway check": "it names a file of the checkout; tests/unit/cli/test_check_command.py",
    "headway models pull": "it downloads; tests/unit/cli/test_models_command.py",
    "headway models rm": "it asks; tests/unit/cli/test_models_command.py",
    "headway doctor": "tests/unit/cli/test_doctor.py",
    "pip ": "tests/ray/own/test_installed_wheel.py",
    "uv ": "its option is in uv's documents",
    ". ": "it changes the shell; tests/ray/serve/launch/test_private_cluster.py runs Ray's commands after it",
    "ulimit ": "it changes the shell; tests/unit/test_deploy_files.py checks the variables that follow it",
    "ray ": "tests/ray/serve/launch/test_private_cluster.py; `ray up` needs an account",
    "serve ": "tests/ray/own/test_deploy.py",
    "kubectl ": "tests/unit/deploy/test_deploy_files.py checks the file against its schema",
    "docker ": "tests/unit/deploy/test_deploy_files.py",
    "headway bench --concurrency 1,4,16": "it takes minutes; docs/commands.md has a shorter one",
    "headway bench --rate": "it takes minutes; tests/unit/cli/clients/test_bench_command.py",
    "headway bench --trace": "tests/unit/cli/clients/test_bench_command.py",
    "python -m bench": "bench has tests of its own in tests/unit/bench",
}
"""Beginnings of commands that do not run here, and the test that runs them or the reason."""
SCRIPTED = {"tools": "tests/service/test_tools.py runs its program, with a model that calls tools"}
"""Documents whose Python does not run here, and the test that runs it."""
READERS: dict[str, Callable[[str], object]] = {
    "yaml": yaml.safe_load,
    "json": json.loads,
    "ini": lambda text: RawConfigParser(strict=False).read_string(text),
}
"""Languages of data, and what reads a block of each."""
NOT_RUN = {
    "text": "output, or a command for a machine that the tests do not have",
    "nginx": "docs/proxy.md: nginx is not installed everywhere",
    "caddy": "docs/proxy.md: Caddy is not installed everywhere",
}
"""Languages of blocks that nothing runs or reads, and the reason."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks_of(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block."""
    for match in _BLOCK.finditer(document.read_text()):
        yield match[1], match[2]


def runnable(script: str) -> str:
    """Return a shell script without the commands that run elsewhere."""
    lines = re.sub(r"\\\n\s*", " ", script).splitlines()
    return "\n".join(line for line in lines if not line.startswith(tuple(ELSEWHERE)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**20),
        EngineLimits(max_num_seqs=16),
    )
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL)
    async with local_service(options, settings, tmp_path_factory.mktemp("data")) as service:
        yield service.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def programs() -> AsyncIterator[PythonPrograms]:
    async with python_programs() as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path, url: str) -> dict[str, str]:
    """The environment of a user's shell: the virtual environment is active, and the server has another port."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "HEADWAY_URL": url, "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1"}


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings, by the rule that GitHub and the site share."""
    text = _BLOCK.sub("", document.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(text)}


def broken_links_of(document: Path) -> list[str]:
    """Return the links that lead to no file or to no heading of it, and those that leave the site's folder."""
    broken = []
    for path, anchor in _LINK.findall(_BLOCK.sub("", document.read_text())):
        target = (document.parent / path).resolve() if path else document
        leaves = document.parent.name == "docs" and not target.is_relative_to(document.parent)
        if leaves or not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}")
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links_of(document) == []


def test_a_link_to_no_heading_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](#one-two) [b](#three) [c](other.md) [d](page.md#one-two)\n```text\n[e](x)\n```\n")
    assert broken_links_of(page) == ["#three", "other.md#"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_blocks_name_their_language_and_data_can_be_read(document: Path) -> None:
    for language, text in blocks_of(document):
        assert language in {"sh", "python", *READERS, *NOT_RUN}
        if language in READERS:
            READERS[language](text)


def test_the_site_has_every_document() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    pages = [page for part in project["nav"] for of_part in part.values() for page in of_part]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
async def test_every_command_works(
    document: Path, url: str, environment: dict[str, str], programs: PythonPrograms, tmp_path: Path
) -> None:
    for language, text in blocks_of(document):
        script = text.replace(URL, url).replace(".venv/bin/", "")
        if language == "python" and document.stem not in SCRIPTED:
            status, output = await programs.run(script, tmp_path, environment)
            assert status == 0 and '{"error":' not in output, f"{script}\n{output}"
        elif language == "sh" and runnable(script).strip():
            await run(["bash", "-euo", "pipefail", "-c", runnable(script)], environment, tmp_path)


async def run(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run a command in `folder`; its output must show no error of the server, and its exit status must be 0."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, f"{command[-1]}\n{output}"
    assert '{"error":' not in output, f"{command[-1]}\n{output}"
