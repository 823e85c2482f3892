"""`headway run` where a server answers, and where none can be started."""

import asyncio
from functools import partial
from pathlib import Path

from typer.testing import CliRunner, Result

from serve_app.cli.main import app
from testkit.free_port import free_port
from testkit.http.api import MODEL, REPLY, Api, serving
from testkit.limits import LIMIT_S


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


async def test_a_server_that_has_the_model_answers(api: Api) -> None:
    api.replica.stops_at = 5
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        result = await asyncio.to_thread(partial(run, MODEL, "hi", "--system", "Be brief.", "--url", url))
    answer = result.stdout.removesuffix("\n")
    assert (result.exit_code, result.stderr) == (0, "") and answer and REPLY.startswith(answer)


async def test_a_server_with_another_model_is_left_alone(api: Api) -> None:
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        result = await asyncio.to_thread(partial(run, "acme/other", "hi", "--url", url))
    assert result.exit_code == 1 and not api.replica.started
    assert f"{url} serves {MODEL} and not acme/other; stop that server, or name a free address" in result.stderr
    assert "`headway run acme/other --url http://127.0.0.1:8001`" in result.stderr


def test_only_this_machine_gets_a_server() -> None:
    port = free_port("127.0.0.1")
    for url in (f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}/prefix", f"http://127.0.0.2:{port}"):
        result = run("headway-demo", "hi", "--url", url)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"nothing answers at {url}, and a server can be started at an address of this machine" in result.stderr


def test_a_start_that_fails_shows_its_reason(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    missing = run(str(tmp_path / "none"), "hi", "--url", url)
    assert (missing.exit_code, missing.stderr) == (1, f"error: model: there is no directory {tmp_path / 'none'}\n")
    broken = run(str(tmp_path), "hi", "--url", url)  # found by the child
    assert broken.exit_code == 1 and broken.stdout == ""
    assert broken.stderr.startswith(f"error: model: {tmp_path} has no config.json") and "\n" not in broken.stderr[:-1]
