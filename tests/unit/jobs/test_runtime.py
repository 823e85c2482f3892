"""A whole jobs process: every submitted batch ends, through failures and restarts of the process."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from replicas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    SequenceFailed,
    ServingError,
)
from replicas.protocol import Band
from replicas.timing.clock import Clock
from serve_app.jobs.api.errors import UnknownFile
from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStatus,
    FileRecord,
    JobsSettings,
    JsonObject,
    LineStatus,
    NewBatch,
    PageRequest,
    RequestCounts,
)
from testkit.jobs.database_worlds import ENDPOINT, MODEL, body, new_batch
from testkit.jobs.jobs_process import Process, ScriptedCompletions, jobs_process
from testkit.jobs.memory_files import MemoryFiles
from testkit.limits import LIMIT_S, until

pytestmark = pytest.mark.rotated

TENANT = "acme"
NOW = 1_000_000.0


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture
def completions() -> ScriptedCompletions:
    completions = ScriptedCompletions()
    completions.gate.set()
    return completions


@pytest.fixture
async def process(database_url: str, files: MemoryFiles, completions: ScriptedCompletions) -> AsyncIterator[Process]:
    async with jobs_process(database_url, files, completions) as process:
        yield process


QUICK = JobsSettings(MODEL, job_lease_s=0.3)
"""Leases that end soon after their owner."""


async def submit_file(process: Process, files: MemoryFiles, num_lines: int, **fields: Any) -> BatchRecord:
    return await submit_bodies(process, files, [body(index) for index in range(num_lines)], **fields)


async def submit_bodies(
    process: Process, files: MemoryFiles, bodies: Sequence[JsonObject], **fields: Any
) -> BatchRecord:
    lines = [
        {"custom_id": f"id-{index}", "method": "POST", "url": ENDPOINT, "body": one} for index, one in enumerate(bodies)
    ]
    return await submit_text(process, files, "\n".join(map(json.dumps, lines)), **fields)


async def submit_text(process: Process, files: MemoryFiles, text: str, **fields: Any) -> BatchRecord:
    files.files["file-in"] = text.encode()
    await process.service.add_file(FileRecord("file-in", TENANT, "batch", "in.jsonl", 1, NOW))
    return await submit(process, new_batch(kind=BatchKind.FILE, input_file_id="file-in", **fields))


async def submit(process: Process, new: NewBatch) -> BatchRecord:
    record: BatchRecord = (await process.service.submit(new)).batch
    return record


async def ended(process: Process, batch: BatchRecord) -> BatchRecord:
    record: BatchRecord = await process.service.wait(batch.tenant, batch.id, LIMIT_S)
    assert record.status.is_final
    return record


def results(files: MemoryFiles, *file_ids: str | None) -> list[JsonObject]:
    return [json.loads(line) for file_id in file_ids if file_id for line in files.files[file_id].splitlines()]


def outcome(result: JsonObject) -> tuple[str, int, str | None]:
    """Return the custom id of a result, its status code, and the parameter that its error names."""
    response = result["response"]
    return result["custom_id"], response["status_code"], response["body"]["error"]["param"]


async def test_a_file_of_requests_gives_a_file_of_results_in_order(process, files, completions):
    record = await ended(process, await submit_file(process, files, 30))
    assert (record.status, record.counts, record.error_file_id) == (
        BatchStatus.COMPLETED, RequestCounts(30, 30, 0), None,
    )  # fmt: skip
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (90, 120, 60)
    answers = results(files, record.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"id-{index}" for index in range(30)]
    assert answers[3]["error"] is None
    assert answers[3]["response"] | {"request_id": ""} == {
        "status_code": 200, "request_id": "", "body": {"text": "prompt 3"},
    }  # fmt: skip
    output = await process.service.file(TENANT, record.output_file_id)
    assert (output.purpose, output.num_bytes) == ("batch_output", len(files.files[output.id]))
    assert completions.most_running <= 6


async def test_a_result_is_one_line_for_every_reader(process, files):
    text = "a\u2028b\u2029c\x85d\ne\x0bf"
    line = {"custom_id": text, "method": "POST", "url": ENDPOINT, "body": body(prompt=text)}
    record = await ended(process, await submit_text(process, files, json.dumps(line)))
    [answer] = files.files[record.output_file_id].decode().splitlines()
    assert json.loads(answer)["custom_id"] == json.loads(answer)["response"]["body"]["text"] == text


async def test_errors_of_requests_go_into_the_error_file(process, files, completions):
    completions.errors["prompt 1"] = [InvalidRequest("`prompt` is no good", "prompt")]
    completions.errors["prompt 2"] = [SequenceFailed("no")] * 3
    record = await ended(process, await submit_file(process, files, 4))
    assert (record.status, record.counts) == (BatchStatus.COMPLETED, RequestCounts(4, 2, 2))
    failed = results(files, record.error_file_id)
    assert list(map(outcome, failed)) == [("id-1", 400, "prompt"), ("id-2", 500, None)]
    assert failed[0]["error"] is None


@pytest.mark.parametrize(
    ("wrong", "param"), [({"max_tokens": "4"}, "max_tokens"), ({"stream": True}, "stream"), ({"suffix": "x"}, "suffix")]
)
async def test_a_body_that_its_endpoint_would_refuse_fails_alone(process, files, wrong, param):
    record = await ended(process, await submit_bodies(process, files, [body(0), {**body(1), **wrong}, body(2)]))
    assert (record.status, record.counts) == (BatchStatus.COMPLETED, RequestCounts(3, 2, 1))
    assert list(map(outcome, results(files, record.error_file_id))) == [("id-1", 400, param)]


async def test_lines_are_shown_while_they_run_and_after(process, completions):
    completions.gate.clear()
    completions.errors["prompt 1"] = [InvalidRequest("`prompt` is no good", "prompt")]
    record = await submit(process, new_batch(2))
    ids = [f"{record.id.removeprefix('batch_')}-{index}" for index in range(2)]
    await until(lambda: completions.num_running == 2)
    shown = await process.service.line_request("acme", ids[0])
    assert (shown["status"], shown["tenant"], shown["band"], shown["path"]) == ("running", "acme", "batch", ENDPOINT)
    assert await process.service.line_request("other", ids[0]) is None
    completions.gate.set()
    await ended(process, record)
    well, failed = [await process.service.line_request(None, each) for each in ids]
    assert (well["id"], well["status"], well["http_status"], well["completion_tokens"]) == (ids[0], "completed", 200, 4)
    assert (failed["status"], failed["http_status"], failed["error_code"]) == ("failed", 400, "invalid_value")
    for each in (well, failed):
        assert sum(each["metrics"]["parts_ms"].values()) == pytest.approx(each["metrics"]["total_ms"], abs=2.0)
    assert await process.service.line_request("acme", f"cmpl-{ids[0]}") == well
    assert await process.service.line_request("acme", f"{ids[0]}0") is None


PASSING: dict[str, list[ServingError]] = {
    "no replica": [NoReplicaAvailable("none"), DeadlineExceeded("no replica had room"), SequenceFailed("once")],
    "full queue": [Overloaded("full", retry_after_s=1.0)],
}


@pytest.mark.parametrize("name", PASSING)
async def test_a_passing_error_is_retried_and_left_out_of_the_result(process, completions, name):
    completions.errors["prompt 0"] = list(PASSING[name])
    record = await ended(process, await submit(process, new_batch(1, BatchKind.JOB)))
    assert (record.status, record.counts) == (BatchStatus.COMPLETED, RequestCounts(1, 1, 0))
    assert completions.asked == ["prompt 0"] * (len(PASSING[name]) + 1)


async def test_a_job_is_done_without_a_file(process, completions):
    record = await ended(process, await submit(process, new_batch(1, BatchKind.JOB, band=Band.STANDARD)))
    assert (record.status, record.output_file_id) == (BatchStatus.COMPLETED, None)
    [line] = await process.service.lines(TENANT, record.id, -1, 10)
    assert (line.status, line.response) == (LineStatus.SUCCEEDED, {"text": "prompt 0"})
    [caller] = completions.callers
    assert (caller.principal.tenant, caller.principal.band_ceiling) == (TENANT, Band.STANDARD)


async def test_a_wait_returns_at_the_end_or_with_the_current_state(process, completions):
    completions.gate.clear()
    batch = await submit(process, new_batch(2))
    assert (await process.service.wait(TENANT, batch.id, 0.05)).status is BatchStatus.IN_PROGRESS
    waiting = asyncio.create_task(process.service.wait(TENANT, batch.id, LIMIT_S))
    await until(lambda: completions.num_running == 2)
    completions.gate.set()
    assert (await waiting).status is BatchStatus.COMPLETED


async def test_a_cancelled_batch_keeps_what_was_done(database_url, files, completions):
    async with jobs_process(database_url, files, completions, num_slots=2) as process:
        completions.gate.clear()
        batch = await submit_file(process, files, 20)
        await until(lambda: completions.num_running >= 2)
        completions.gate.set()
        await until(lambda: len(completions.asked) > 4)
        completions.gate.clear()
        record = await process.service.cancel(TENANT, batch.id)
        assert record.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
        record = await ended(process, batch)
        assert record.status is BatchStatus.CANCELLED
        assert record.counts.completed >= 1 and record.counts.failed >= 1
        everything = results(files, record.output_file_id, record.error_file_id)
        assert sorted(one["custom_id"] for one in everything) == sorted(f"id-{index}" for index in range(20))
        assert {one["error"]["code"] for one in results(files, record.error_file_id)} == {"batch_cancelled"}
        await until(lambda: completions.num_running == 0)


async def test_a_late_batch_expires_with_what_was_done(database_url, files, completions):
    now = NOW
    completions.gate.clear()
    async with jobs_process(database_url, files, completions, clock=Clock(unix=lambda: now)) as process:
        batch = await submit_file(process, files, 5, window_s=60.0)
        await until(lambda: completions.num_running > 0)
        now += 61
        record = await ended(process, batch)
        assert (record.status, record.output_file_id, record.counts.failed) == (BatchStatus.EXPIRED, None, 5)
        assert {one["error"]["code"] for one in results(files, record.error_file_id)} == {"batch_expired"}


async def test_the_next_process_finishes_the_lines_of_a_killed_one(database_url, files, completions):
    completions.gate.clear()
    async with jobs_process(database_url, files, completions, settings=QUICK, is_killed=True) as process:
        batch = await submit_file(process, files, 12)
        await until(lambda: completions.num_running > 0)
    completions.gate.set()
    async with jobs_process(database_url, files, completions, settings=QUICK) as process:
        record = await ended(process, batch)
        assert record.status is BatchStatus.COMPLETED
        answers = results(files, record.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"id-{index}" for index in range(12)]


async def test_a_stopping_process_gives_its_lines_back_at_once(database_url, files, completions):
    completions.gate.clear()
    async with jobs_process(database_url, files, completions) as process:
        batch = await submit(process, new_batch(3))
        await until(lambda: completions.num_running == 3)
    assert completions.num_running == 0
    completions.gate.set()
    async with jobs_process(database_url, files, completions) as process:
        assert (await ended(process, batch)).counts.completed == 3


async def test_processes_on_one_database_share_the_work_and_do_it_once(process, database_url, files, completions):
    async with jobs_process(database_url, files, completions) as other:
        batches = [await submit(process, new_batch(20)) for _ in range(3)]
        for batch in batches:
            assert (await ended(other, batch)).counts.completed == 20
        assert sorted(completions.asked) == sorted(f"prompt {index}" for index in range(20) for _ in batches)


async def test_a_passing_file_store_failure_only_delays_the_batch(process, files, completions):
    batch = await submit_file(process, files, 3)
    await until(lambda: len(completions.asked) > 0)
    files.num_failures = 1
    record = await ended(process, batch)
    assert record.status is BatchStatus.COMPLETED
    assert len(results(files, record.output_file_id)) == 3


async def test_an_urgent_job_does_not_wait_for_a_batch(database_url, files, completions):
    completions.gate.clear()
    async with jobs_process(database_url, files, completions, num_slots=2) as process:
        await submit(process, new_batch(50))
        await until(lambda: completions.num_running >= 2)
        await submit(process, new_batch(1, BatchKind.JOB, band=Band.INTERACTIVE))
        await until(lambda: Band.INTERACTIVE in {caller.requested_band for caller in completions.callers})
        assert len(completions.asked) < 10


async def test_lines_of_a_late_batch_restart_in_an_urgent_band(database_url, files, completions):
    now = NOW
    completions.gate.clear()
    async with jobs_process(database_url, files, completions, num_slots=2, clock=Clock(unix=lambda: now)) as process:
        batch = await submit(process, new_batch(3, window_s=3600.0, band_ceiling=Band.INTERACTIVE))
        modest = await submit(process, new_batch(1, window_s=3600.0, band_ceiling=Band.BATCH, tenant="modest"))
        await until(lambda: completions.num_running >= 2)
        assert {caller.requested_band for caller in completions.callers} == {Band.BATCH}
        now += 3500
        await until(lambda: Band.STANDARD in {caller.requested_band for caller in completions.callers})
        completions.gate.set()
        assert (await ended(process, batch)).counts.completed == 3
        assert (await ended(process, modest)).status is BatchStatus.COMPLETED
    bands = {(caller.principal.tenant, caller.requested_band) for caller in completions.callers}
    assert bands == {(TENANT, Band.BATCH), (TENANT, Band.STANDARD), ("modest", Band.BATCH)}


async def test_the_backlog_counts_before_any_replica_reports(process, completions):
    completions.errors["prompt 0"] = [NoReplicaAvailable("none") for _ in range(3)]
    batch = await submit(process, new_batch(1, BatchKind.JOB, band=Band.STANDARD))
    await until(lambda: process.backlog.num_requests() == 1)
    [work] = process.backlog.work()
    assert (work.band, work.deadline_unix_s) == (Band.STANDARD, None) and work.tokens >= 1
    await ended(process, batch)
    await until(lambda: process.backlog.num_requests() == 0)


async def test_a_deleted_files_bytes_go_too(process, files):
    await ended(process, await submit_file(process, files, 1))
    await process.service.delete_file(TENANT, "file-in")
    assert "file-in" not in files.files
    with pytest.raises(UnknownFile):
        await process.service.file(TENANT, "file-in")


async def test_stats_and_metrics_count_every_batch_once(process, completions):
    for _ in range(3):
        await ended(process, await submit(process, new_batch(2)))
    completions.gate.clear()
    await submit(process, new_batch(1))
    stats = await process.service.stats(TENANT)
    assert (stats.total, stats.completed, stats.processing, stats.failed) == (4, 3, 1, 0)
    assert stats.tokens_per_s > 0
    page = await process.service.batches(TENANT, BatchKind.PROMPTS, PageRequest(2))
    assert (len(page.items), page.has_more) == (2, True)
    shown = {(metric.name, *metric.labels): metric.value for metric in await process.runtime.metrics({})}
    assert shown["headway:jobs", ("state", "completed")] == 3
    assert shown["headway:batch_requests", ("status", "succeeded")] == 6


async def test_the_process_is_unhealthy_once_its_database_is_gone(database_url, files, completions):
    async with jobs_process(database_url, files, completions, is_killed=True) as process:
        process.runtime.check_health()
        process.runtime._context.database.close()
        await until(lambda: process.runtime._loops is not None and process.runtime._loops.done())
        with pytest.raises(RuntimeError):
            process.runtime.check_health()
