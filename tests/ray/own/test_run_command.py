"""`headway run` without a server: it starts one, chats, and leaves nothing behind."""

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


def started(home: Path, url: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serve_app.cli.main", "run", "headway-demo", *arguments, "--url", url]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(home), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.parametrize("signum", [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_server_lasts_as_long_as_the_command(tmp_path: Path, signum: signal.Signals | None) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with started(tmp_path, url, *(() if signum else ("hi",))) as process:
        try:
            child = wait_for(lambda: psutil.Process(process.pid).children(), "the server is started", LIMIT_S)[0]
            if signum:
                wait_for(lambda: child.children(recursive=True), "the server has processes", LIMIT_S)
                process.send_signal(signum)
            out, err = process.communicate(timeout=START_LIMIT_S)
        finally:
            process.kill()
    if signum is None:
        assert process.returncode == 0 and out.strip()
        assert "Starting headway-demo: replicas ...\n" in err and "Serving" not in out + err
    else:
        assert process.returncode in (130, 128 + signum) and out == ""
    assert not child.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
