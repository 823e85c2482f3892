"""Profile and ingresses that a server gets on a machine, and the memory of its processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli.server.memory_report import memory_line
from serve_app.cli.server.profile import Profile, choose_front
from serve_app.config import HeadwayConfig


@pytest.mark.parametrize(
    ("num_cpus", "profile", "num_ingresses"),
    [
        (0.4, Profile.DEFAULT, 1),
        (2, Profile.DEFAULT, 1),
        (4, Profile.THROUGHPUT, 1),
        (16, Profile.THROUGHPUT, 2),
        (192, Profile.THROUGHPUT, 4),
    ],
)
def test_a_machine_chooses(num_cpus: float, profile: Profile, num_ingresses: int) -> None:
    front, config = choose_front(Profile.AUTO, HeadwayConfig(), num_cpus)
    assert (front.profile, front.num_ingresses, config.num_ingress_replicas) == (profile, num_ingresses, num_ingresses)
    assert str(front).endswith(f"for {num_cpus:g} processors")


def test_what_the_user_says_stays() -> None:
    front, config = choose_front(Profile.DEFAULT, HeadwayConfig(), 64)
    assert str(front) == "default: Serve's HTTP proxy and 1 ingress" and config == HeadwayConfig()
    given = HeadwayConfig(num_ingress_replicas=3)
    front, config = choose_front(Profile.AUTO, given, 64)
    assert front.profile is Profile.THROUGHPUT and config is given and front.num_ingresses == 3


@pytest.mark.parametrize("content", ["#!/bin/sh\nexit 1\n", "no program"])
def test_without_a_haproxy_that_runs_the_profile_is_the_default_one(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "haproxy"
    program.write_text(content)
    program.chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(program))
    front, config = choose_front(Profile.AUTO, HeadwayConfig(), 64)
    assert front.profile is Profile.DEFAULT and config == HeadwayConfig()
    assert "since HAProxy does not run here" in str(front)


def test_memory_is_told_by_deployment() -> None:
    code = "import sys; held = b'x' * 64 * 2**20; print(); sys.stdin.read()"
    titles = ["ray::ServeReplica:headway:Model.run", "ray::ServeReplica:headway:Model", "ray::IDLE"]
    children = [
        subprocess.Popen([title, "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for title in titles
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        line = memory_line()
    finally:
        for child in children:
            child.communicate()
    of_model, of_ray = line.split(", ")
    number, _, size = of_model.removeprefix("Model ").partition(" x ")
    assert number == "2" and 64 <= float(size.removesuffix(" MiB")) < 128
    assert of_ray.startswith("Ray and Serve ") and line.endswith(" GiB in all")
