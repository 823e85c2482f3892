"""`headway batch` against a server whose work the test does."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from replicas.errors import NoReplicaAvailable
from serve_app.cli.main import app
from serve_app.jobs.api.records import BatchError, BatchStatus, FileRecord, RequestCounts
from serve_app.keys.key_file import digest_of
from testkit.http.api import Api, MakeApi, serving
from testkit.limits import LIMIT_S, until

OUTPUT = b'{"custom_id": "a", "response": {"status_code": 200}}\n'


@dataclass
class Shell:
    """Runs `headway batch` beside the server."""

    api: Api
    url: str

    async def run(self, *arguments: str, **environment: str) -> Result:
        invoke = partial(CliRunner().invoke, app, ["batch", *arguments], env={"HEADWAY_URL": self.url, **environment})
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.to_thread(invoke)

    async def end(self, batch_id: str, status: BatchStatus = BatchStatus.COMPLETED, **fields: Any) -> None:
        """Let a batch end with an output file."""
        self.api.jobs.store.files["file-out"] = OUTPUT
        self.api.jobs.records["file-out"] = FileRecord("file-out", "anonymous", "batch_output", "out", len(OUTPUT), 1.0)
        self.api.jobs.change(
            batch_id, status=status, output_file_id="file-out", counts=RequestCounts(3, 2, 1), **fields
        )


@pytest.fixture
async def shell(api: Api) -> AsyncIterator[Shell]:
    async with serving(api.app) as url:
        yield Shell(api, url)


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"custom_id": "a"}) + "\n")
    return path


async def test_submit_uploads_and_prints_the_id(shell: Shell, requests_file: Path) -> None:
    result = await shell.run(
        "submit", str(requests_file), "--endpoint", "/v1/completions", "--window", "90s", "--metadata", "night=1"
    )
    assert result.exit_code == 0, result.output
    [(batch_id, new)] = shell.api.jobs.new.items()
    assert result.stdout == f"{batch_id}\n"
    assert (new.endpoint, new.window_s, new.metadata) == ("/v1/completions", 90.0, {"night": "1"})
    assert new.input_file_id is not None
    assert shell.api.jobs.store.files[new.input_file_id] == requests_file.read_bytes()
    assert shell.api.jobs.records[new.input_file_id].filename == "requests.jsonl"


async def test_submit_and_wait_saves_the_results(shell: Shell, requests_file: Path, tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    options = ("--wait", "--poll-every", "0.01", "--output", str(out), "--errors", str(errors))
    running = asyncio.create_task(shell.run("submit", str(requests_file), *options))
    await until(lambda: bool(shell.api.jobs.new))
    await shell.end("batch_0")
    result = await running
    assert (result.exit_code, result.stdout) == (0, "batch_0\n")
    assert "2 completed, 1 failed, of 3" in result.stderr
    assert out.read_bytes() == OUTPUT and not errors.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "requests.jsonl"]


async def test_status_and_cancel_print_the_progress(shell: Shell, requests_file: Path) -> None:
    await shell.run("submit", str(requests_file))
    assert "validating" in (await shell.run("status", "batch_0")).stdout
    assert "cancelling" in (await shell.run("cancel", "batch_0")).stdout
    await shell.end("batch_0", BatchStatus.CANCELLED)
    result = await shell.run("cancel", "batch_0")
    assert (result.exit_code, "has ended" in result.stderr, result.stdout) == (1, True, "")


async def test_wait_for_a_failed_batch_exits_1_with_its_reasons(shell: Shell, requests_file: Path) -> None:
    await shell.run("submit", str(requests_file))
    errors = tuple(BatchError("invalid_json_line", "no JSON", line=line) for line in range(1, 15))
    await shell.end("batch_0", BatchStatus.FAILED, errors=errors)
    result = await shell.run("wait", "batch_0", "--poll-every", "0.01")
    assert result.exit_code == 1
    assert "line 10: no JSON" in result.stderr and "line 11" not in result.stderr
    assert "4 more errors" in result.stderr


async def test_wait_outlasts_a_server_that_is_busy(shell: Shell, requests_file: Path) -> None:
    await shell.run("submit", str(requests_file))
    num_asked = 0
    batch = shell.api.jobs.batch

    async def first_busy(tenant: str, batch_id: str) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise NoReplicaAvailable("restarting")
        return await batch(tenant, batch_id)

    shell.api.jobs.batch = first_busy  # type: ignore[method-assign]
    await shell.end("batch_0")
    assert (await shell.run("wait", "batch_0", "--poll-every", "0.01")).exit_code == 0
    assert num_asked == 3


async def test_refusals_and_absent_servers_print_one_line(shell: Shell, requests_file: Path) -> None:
    for arguments, what in (
        (("status", "batch_none"), "there is no batch"),
        (("submit", str(requests_file), "--window", "never"), "completion_window"),
        (("submit", str(requests_file), "--endpoint", "/v1/images"), "endpoint"),
        (("wait", "batch_none"), "404"),
        (
            ("status", "x", "--url", "http://127.0.0.1:1"),
            "cannot reach http://127.0.0.1:1: Connection refused; `headway serve`",
        ),
    ):
        result = await shell.run(*arguments)
        assert result.exit_code == 1
        assert "error: " in result.stderr and what in result.stderr
        assert "Traceback" not in result.output


async def test_list_shows_the_newest_batches(shell: Shell, requests_file: Path) -> None:
    for _ in range(3):
        await shell.run("submit", str(requests_file))
    await shell.end("batch_2")
    lines = (await shell.run("list", "--limit", "2")).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["batch_2", "completed"], ["batch_1", "validating"]]
    assert "3 of 3 (1 failed)" in lines[1]


async def test_download_saves_the_results_of_an_ended_batch(
    shell: Shell, requests_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await shell.run("submit", str(requests_file))
    early = await shell.run("download", "batch_0")
    assert (early.exit_code, "no output_file_id; its status is validating" in early.stderr) == (1, True)
    await shell.end("batch_0", error_file_id="file-out")
    assert (await shell.run("download", "batch_0")).stdout == "batch_0-output.jsonl\nbatch_0-errors.jsonl\n"
    assert Path("batch_0-errors.jsonl").read_bytes() == OUTPUT
    chosen = await shell.run("download", "batch_0", "--output", "mine.jsonl")
    assert (chosen.stdout, Path("mine.jsonl").read_bytes()) == ("mine.jsonl\n", OUTPUT)


async def test_wrong_usage_is_exit_code_2(shell: Shell, requests_file: Path) -> None:
    for arguments in (
        ("submit", "nowhere.jsonl"),
        ("submit", str(requests_file), "--output", "out.jsonl"),
        ("submit", str(requests_file), "--metadata", "novalue"),
        ("status",),
    ):
        assert (await shell.run(*arguments)).exit_code == 2


async def test_key_comes_from_the_option_or_the_environment(
    make_api: MakeApi, requests_file: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{digest_of('k')}:\n  tenant: acme\n")
    api = make_api(settings={"api_key_file": str(keys)})
    async with serving(api.app) as url:
        shell = Shell(api, url)
        assert (await shell.run("submit", str(requests_file), "--api-key", "k")).exit_code == 0
        assert (await shell.run("status", "batch_0", HEADWAY_API_KEY="k")).exit_code == 0
        refused = await shell.run("status", "batch_0")
    assert refused.exit_code == 1 and "API key" in refused.stderr
