"""`headway run` without a server: the one that it starts ends with it. test_installed_wheel.py lets it chat."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import ROOT, clean_environment, wait_for


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_server_ends_with_the_command(tmp_path: Path, signum: signal.Signals) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-m", "serve_app.cli.main", "run", "headway-demo", "--url", url]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(tmp_path), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            child = wait_for(lambda: psutil.Process(process.pid).children(), "the server is started", LIMIT_S)[0]
            wait_for(lambda: child.children(recursive=True), "the server has processes", LIMIT_S)
            process.send_signal(signum)
            out, err = process.communicate(timeout=START_LIMIT_S)
        finally:
            process.kill()
    assert process.returncode in (130, 128 + signum) and out == "", err
    assert not child.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
