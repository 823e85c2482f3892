"""`headway bench` against a server whose timing and tokens are known."""

import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from replicas.errors import Overloaded
from serve_app.benchmark.rows import read_rows
from serve_app.cli.main import app
from serve_app.keys.key_file import digest_of
from testkit.http.api import MakeApi, serving
from testkit.limits import LIMIT_S, until

# A process that runs in the background may have inherited a SIGINT that is ignored.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from serve_app.cli.main import app; app()"
)
SMALL = ("--num-requests", "6", "--prompt-tokens", "60", "--max-tokens", "8")


async def run(url: str, *arguments: str) -> Result:
    invoke = partial(CliRunner().invoke, app, ["bench", "--url", url, *arguments])
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(invoke)


async def figures(url: str, path: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON file of a run that succeeds."""
    result = await run(url, "--json", str(path), *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


async def test_figures_are_those_of_the_server(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(ttft_s=0.05, tpot_s=0.02, tokens_per_delta=2)
    async with serving(api.app) as url:
        found = await figures(url, tmp_path / "f.json", *SMALL, "--rows", str(tmp_path / "rows"), "--concurrency", "3")
    [level] = found["levels"]
    assert (level["outcomes"], level["output_tokens"]) == ({"ok": 6}, 48)
    rows = read_rows(tmp_path / "rows")
    # A slow machine reads several deltas at a time: such a chunk has their tokens together.
    chunks = [count for row in rows for count in row.chunk_tokens]
    assert (len(rows), sum(chunks), {count % 2 for count in chunks}) == (6, 48, {0})
    assert level["tokens_per_chunk"] == 48 / len(chunks)
    # The server waits at least 50 ms. A slow machine only adds to it.
    assert 50 <= level["ttft_ms"]["p50"] < LIMIT_S * 1e3
    assert level["chunk_gap_ms"]["mean"] == pytest.approx(1e3 * mean(gap for row in rows for gap in row.gaps_s))
    assert level["itl_ms"]["mean"] == pytest.approx(1e3 * mean(gap for row in rows for gap in row.inter_token_s))
    assert level["tpot_ms"]["mean"] == pytest.approx(1e3 * mean(row.tpot_s for row in rows if row.tpot_s is not None))
    prompts = [len(request.prompt_token_ids) for request in api.replica.started[-6:]]
    assert level["prompt_tokens"] == sum(prompts) and 40 <= sum(prompts) / 6 <= 80


async def test_levels_get_a_line_each_and_a_plot(make_api: MakeApi, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    async with serving(make_api().app) as url:
        result = await run(url, *SMALL, "--rate", "50,200", "--arrivals", "constant", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:3] for line in lines[2:]] == [["50/s", "6", "0"], ["200/s", "6", "0"]]
    assert "goodput" in lines[1] and plot.read_text().count("<svg") == 1


async def test_a_failed_request_is_counted_and_does_not_end_the_run(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(fail_at=3, fail_only=lambda request: request.params.max_tokens > 4)
    async with serving(api.app) as url:
        options = ("--num-requests", "20", "--prompt-tokens", "60", "--max-tokens", "2:8", "--warmup", "2")
        found = await figures(url, tmp_path / "f.json", *options)
    [level] = found["levels"]
    assert level["num_requests"] == 20 and level["outcomes"].keys() == {"ok", "stream_error"}
    assert sum(level["errors"].values()) == level["outcomes"]["stream_error"]


async def test_refused_requests_are_sent_again_if_wanted(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(fail_at=0, error=Overloaded("busy"), fail_only=lambda request: request.params.max_tokens > 4)
    rows, options = tmp_path / "rows", ("--num-requests", "2", "--prompt-tokens", "60", "--max-tokens", "8")
    async with serving(api.app) as url:
        for arguments, attempts in (((), [1, 1]), (("--retries",), [3, 3])):
            await run(url, *options, *arguments, "--rows", str(rows))
            found = read_rows(rows)
            assert [row.num_attempts for row in found] == attempts
    # The server asks for a second before each.
    assert all(row.last_sent_s and row.sent_s is not None and row.last_sent_s - row.sent_s >= 2 for row in found)


async def test_requests_say_what_the_options_say(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api()
    trace = tmp_path / "trace.jsonl"
    first = {"time": 0.01, "prompt": "hello", "max_tokens": 3, "band": "batch"}
    second = {"time": 0.02, "prompt": [20, 21], "max_tokens": 4, "extra_body": {"seed": 7}}
    trace.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    async with serving(api.app) as url:
        await figures(url, tmp_path / "f.json", "--trace", str(trace), "--endpoint", "completions", "--ignore-eos")
    sent, other = api.replica.started[-2:]
    assert (sent.params.max_tokens, sent.band.name, sent.params.ignore_eos) == (3, "BATCH", True)
    assert (other.prompt_token_ids, other.params.max_tokens, other.params.seed) == ((20, 21), 4, 7)


async def test_the_first_error_ends_it_with_its_message(make_api: MakeApi, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{digest_of('k')}:\n  tenant: acme\n")
    api = make_api(settings={"api_key_file": str(keys)})
    async with serving(api.app) as url:
        for arguments, words in (
            (("--api-key", "k", "--model", "nope"), "`nope` is not served here"),
            (("--model", "tiny"), "API key"),
            (("--url", "http://127.0.0.1:1", "--model", "tiny"), "127.0.0.1:1"),
            (("--api-key", "k", "--extra-body", '{"tools": 3}'), "tools"),
        ):
            result = await run(url, *SMALL, *arguments)
            assert (result.exit_code, words in result.stderr) == (1, True), result.output
        report = tmp_path / "f.json"
        await figures(url, report, *SMALL, "--api-key", "k")
    assert api.replica.started and "Bearer" not in report.read_text()


async def test_ctrl_c_prints_what_was_done(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(gate_at=4, gate=asyncio.Event())
    arguments = ("bench", *SMALL, "--concurrency", "3", "--json", str(tmp_path / "f.json"))
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            COMMAND,
            *arguments,
            "--url",
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await until(lambda: len(api.replica.running) == 3 and api.replica.num_deltas > 3 * 4)
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    assert process.returncode == 130 and b"3 cut off" in output
    assert json.loads((tmp_path / "f.json").read_text())["is_interrupted"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrency", "2", "--rate", "3"), "exclude each other"),
        (("--concurrency", "1.5"), "not whole"),
        (("--rate", "0"), "not above 0"),
        (("--prompt-tokens", "9:3"), "low <= high"),
        (("--shared-prefix-tokens", "256"), "not below"),
        (("--band", "urgent"), "interactive"),
        (("--extra-body", "[]"), "JSON object"),
        (("--plot", "plot.pdf"), ".png or .svg"),
        (("--json", "/nowhere/f.json"), "no folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--url", "http://127.0.0.1:1", *arguments])
    assert (result.exit_code, words in result.stderr) == (2, True), result.output


def test_api_keys_are_not_written_down() -> None:
    from serve_app.benchmark.session import shown_command

    assert shown_command(["/usr/bin/python", "x", "--api-key", "secret", "--api-key=secret", "y"]) == (
        "python x --api-key ... --api-key=... y"
    )
