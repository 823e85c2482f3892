"""The commands of the documents work: every block runs, in the order of its document, against a real server."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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
NOT_COMMANDS = {"text", "yaml", "ini", "json"}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


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


@pytest.fixture
def environment(tmp_path: Path, url: str) -> dict[str, str]:
    """The environment of a user's shell: the virtual environment is active, and the server has another port."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "HEADWAY_URL": url, "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_blocks_name_their_language_and_links_lead_to_files(document: Path) -> None:
    languages = {language for language, _ in blocks_of(document)}
    assert languages <= {"sh", "python", *NOT_COMMANDS}
    links = _LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
async def test_every_command_works(document: Path, url: str, environment: dict[str, str], tmp_path: Path) -> None:
    for language, text in blocks_of(document):
        script = text.replace(URL, url).replace(".venv/bin/", "")
        if language == "python":
            await run([sys.executable, "-c", script], environment, tmp_path)
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
