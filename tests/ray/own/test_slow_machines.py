"""Starts of `headway serve` on machines that are slow, busy or stuck: a slow one comes up, a stuck one says why."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from replicas.child_processes import START_TIMEOUT_VARIABLE
from testkit.free_port import free_port
from testkit.limits import START_LIMIT_S
from testkit.serving.served import ROOT, answers, clean_environment, wait_for

pytestmark = pytest.mark.deep
QUOTA_US, PERIOD_US, NUM_BUSY = 40_000, 100_000, 4
SLOW_START_S = 600.0
STALL_S = 10
AGENT_S = 40.0
"""Time of a start of Ray's dashboard agent, longer than a raylet waits for a port that the agent chooses, seconds."""


@dataclass(frozen=True)
class Start:
    """A server that starts, its address, and the file with what it prints."""

    process: subprocess.Popen[bytes]
    url: str
    output: Path


@pytest.fixture
def share_of_a_processor() -> Iterator[list[str]]:
    """Command that runs another one with 0.4 processors."""
    version_1 = Path("/sys/fs/cgroup/cpu")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"headway-test-{os.getpid()}"
    try:
        group.mkdir()
        if version_1.is_dir():
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
    group.rmdir()


@pytest.fixture
def busy_processors() -> Iterator[list[str]]:
    """Command that runs another one beside four loops that compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    yield []
    for loop in loops:
        loop.kill()
        loop.wait()


@contextlib.contextmanager
def starting(home: Path, *options: str, prefix: Sequence[str] = (), stall_s: int = 120) -> Iterator[Start]:
    """Start a server, and stop it afterwards if it still runs."""
    port = free_port("127.0.0.1")
    serve = [sys.executable, "-m", "serve_app.cli.main", "serve", "headway-demo", "--port", str(port), *options]
    environment = clean_environment(home) | {START_TIMEOUT_VARIABLE: str(stall_s)}
    path = home / "output"
    with path.open("w") as output:
        process = subprocess.Popen(
            [*prefix, *serve], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Start(process, f"http://127.0.0.1:{port}", path)
    finally:
        process.terminate()
        process.wait(START_LIMIT_S)


@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize("profile", ["default", "throughput"])
@pytest.mark.parametrize("machine", ["share_of_a_processor", "busy_processors"])
def test_a_slow_machine_comes_up(
    machine: str, profile: str, attempt: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    prefix = request.getfixturevalue(machine)
    with starting(tmp_path, "--profile", profile, prefix=prefix) as start:

        def is_ready() -> bool:
            assert start.process.poll() is None, start.output.read_text()
            return answers(f"{start.url}/health/ready")

        wait_for(is_ready, "the server is ready", SLOW_START_S, 1.0)


def children_of(start: Start) -> list[psutil.Process]:
    """Return the processes of a server that starts."""
    children: list[psutil.Process] = psutil.Process(start.process.pid).children(recursive=True)
    return children


def test_an_agent_that_starts_slowly_does_not_end_the_start(tmp_path: Path) -> None:
    def agents() -> list[psutil.Process]:
        return [child for child in children_of(start) if any("dashboard/agent.py" in word for word in child.cmdline())]

    with starting(tmp_path) as start:
        agent = wait_for(agents, "the agent starts", START_LIMIT_S, 0.05)[0]
        agent.suspend()
        time.sleep(AGENT_S)
        agent.resume()
        wait_for(lambda: answers(f"{start.url}/health/ready"), "the server is ready", SLOW_START_S, 1.0)


def test_a_daemon_of_ray_that_ends_in_a_start_is_named_and_its_last_lines_are_kept(tmp_path: Path) -> None:
    with starting(tmp_path) as start:

        def has_ended() -> bool:
            if start.process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    for child in children_of(start):
                        if child.name() == "raylet":
                            child.kill()
            return start.process.poll() is not None

        wait_for(has_ended, "the start has ended", START_LIMIT_S)
        reason, place = start.output.read_text().splitlines()[-2:]
        assert re.fullmatch(r"error: Ray's raylet \(process \d+\) ended while Ray started; .*", reason), reason
        log = Path(place.removeprefix("The log is ")).read_text()
        assert "The last lines of raylet.out:" in log and "The last lines of gcs_server.out:" in log


@pytest.mark.parametrize(
    ("title", "step"), [("ray::ProxyActor", "(its last answer: none)"), ("ray::ServeReplica:headway:Model", "Model")]
)
def test_a_part_that_never_answers_ends_the_start_with_one_line(title: str, step: str, tmp_path: Path) -> None:
    with starting(tmp_path, stall_s=STALL_S) as start:

        def has_ended() -> bool:
            for child in psutil.Process(start.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if " ".join(child.cmdline()).startswith(title):
                        child.suspend()
            return start.process.poll() is not None

        wait_for(has_ended, "the start has ended", START_LIMIT_S)
        reason, place = start.output.read_text().splitlines()[-2:]
        assert start.process.returncode == 1
        assert reason.startswith("error: ") and step in reason and START_TIMEOUT_VARIABLE in reason, reason
        assert place.startswith("The log is ")
