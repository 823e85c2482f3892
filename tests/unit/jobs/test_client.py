"""Calls of the jobs deployment over a handle that keeps Serve's promises and no others."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import RayServeException

from replicas.errors import NoReplicaAvailable, Overloaded, ServingError
from replicas.protocol import Metric, MetricKind
from serve_app.jobs.api.errors import BatchNotCancellable, UnknownBatch, UnknownFile
from serve_app.jobs.api.new_lines import NewLine, NewLines
from serve_app.jobs.api.records import (
    BatchKind,
    BatchStatus,
    FileRecord,
    JobsCounts,
    JobsService,
    PageRequest,
    new_batch_id,
)
from serve_app.jobs.client import ServeJobs, answer
from serve_app.jobs.metrics import storage_metric
from testkit.jobs.database_worlds import new_batch
from testkit.jobs.jobs_process import ScriptedCompletions, jobs_process
from testkit.jobs.memory_files import MemoryFiles
from testkit.limits import LIMIT_S, until

TENANT = "acme"


@dataclass
class Deployment:
    """The jobs deployment as far as calls see it."""

    service: Any
    counts: JobsCounts = field(default_factory=JobsCounts)

    async def call(self, name: str, arguments: dict[str, Any]) -> object:
        return await answer(self if name == "metrics" else self.service, name, arguments)

    async def metrics(self) -> JobsCounts:
        return self.counts


@dataclass
class Service:
    """The work of a jobs process, which does it once and then holds its answers back or not."""

    done: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    is_holding: bool = False
    num_cancelled: int = 0
    error: Exception | None = None

    async def delete_file(self, **arguments: Any) -> None:
        await self._do("delete_file", arguments, again=UnknownFile("there is none"))

    async def cancel(self, **arguments: Any) -> str:
        return await self._do("cancel", arguments, again=BatchNotCancellable("it has ended"))

    async def wait(self, **arguments: Any) -> str:
        return await self._do("wait", arguments)

    async def batch(self, **arguments: Any) -> str:
        if self.error is not None:
            raise self.error
        return "as it is"

    async def _do(self, name: str, arguments: dict[str, Any], again: ServingError | None = None) -> str:
        is_again = name in [done for done, _ in self.done]
        self.done.append((name, arguments))
        try:
            if self.is_holding:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if is_again and again is not None:
            raise again
        return "done"


class Handle:
    """A deployment handle over one worker that answers calls, or none yet, and others that only broadcasts reach."""

    def __init__(self, deployment: Deployment | None, *others: Deployment) -> None:
        self.deployment = deployment
        self.others = others
        self.responses: list[Response] = []
        self.hangs = False
        """True: a worker does not answer broadcasts."""

    def broadcast(self, method: str, *args: Any) -> SimpleNamespace:
        async def results(timeout_s: float, return_exceptions: bool) -> list[Any]:
            if self.hangs:
                raise TimeoutError
            workers = [worker for worker in (self.deployment, *self.others) if worker is not None]
            calls = [getattr(worker, method)(*by_value(args)) for worker in workers]
            answers: list[Any] = by_value(await asyncio.gather(*calls, return_exceptions=return_exceptions))
            return answers

        return SimpleNamespace(results_async=results)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, name))

    def lose(self, error: BaseException) -> None:
        """End what is under way with what Serve raises when the process does not live to answer."""
        for response in self.responses:
            if not response.answer.done():
                response.answer.set_exception(error)

    def _call(self, method: str, *args: Any) -> Response:
        work = None if self.deployment is None else getattr(self.deployment, method)(*by_value(args))
        self.responses.append(Response(work))
        return self.responses[-1]


class Response:
    """Call under way. Only `cancel` ends it. A cancelled waiter does not."""

    def __init__(self, work: Awaitable[Any] | None) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False
        self._work = None if work is None else asyncio.ensure_future(self._run(work))

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.answer).__await__()

    def cancel(self) -> None:
        self.was_cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def _run(self, work: Awaitable[Any]) -> None:
        try:
            answer = by_value(await work)
        except Exception as error:
            self.answer.set_exception(error)
        else:
            if not self.answer.done():
                self.answer.set_result(answer)


def by_value(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def handle(service: Service) -> Handle:
    return Handle(Deployment(service))


@pytest.fixture
def client(handle: Handle) -> ServeJobs:
    return ServeJobs(handle)


LOST = [
    ActorUnavailableError("it is gone", b"\0" * 16),
    RayServeException("it is being stopped"),
    grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
    asyncio.CancelledError(),
]
"""Errors of calls to a process that dies or stops before its answer."""


async def test_each_method_does_what_the_service_does(tmp_path: Path) -> None:
    async with jobs_process(f"sqlite:///{tmp_path}/jobs.sqlite3", MemoryFiles(), ScriptedCompletions()) as process:
        call = ServeJobs(Handle(Deployment(process.service))).call
        file = FileRecord("file-1", TENANT, "batch", "in.jsonl", 1, 1_000_000.0)
        await call(JobsService.add_file, file)
        assert await call(JobsService.file, TENANT, file.id) == file
        assert (await call(JobsService.files, TENANT, "batch", PageRequest(10))).items == (file,)
        await call(JobsService.delete_file, TENANT, file.id)
        assert (await call(JobsService.files, TENANT, None, PageRequest(10))).items == ()

        new = new_batch(num_lines=2, idempotency_key="key", body_digest="digest")
        batch_id = new_batch_id(new.kind)
        submission = await call(JobsService.submit, new, batch_id)
        assert submission.is_new and not (await call(JobsService.submit, new, "batch_other")).is_new
        assert (await call(JobsService.batch, TENANT, batch_id)).id == batch_id
        assert not (await call(JobsService.wait, TENANT, batch_id, 0.0)).status.is_final
        assert [
            one.id for one in (await call(JobsService.batches, TENANT, BatchKind.PROMPTS, PageRequest(10))).items
        ] == [batch_id]
        assert [line.index for line in await call(JobsService.lines, TENANT, batch_id, 0, 10)] == [1]
        assert (await call(JobsService.stats, TENANT)).total == 1
        assert (await call(JobsService.cancel, TENANT, batch_id)).status in (
            BatchStatus.CANCELLING,
            BatchStatus.CANCELLED,
        )
        assert await call(JobsService.metrics) == JobsCounts()


@dataclass
class Lines:
    """Line of a batch, as one worker knows it."""

    status: str | None

    async def line_request(self, **arguments: Any) -> dict[str, Any] | None:
        if self.status == "failing":
            raise ValueError("a bug")
        return None if self.status is None else {"status": self.status}


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ([None, None], None),
        ([None, "completed"], "completed"),
        (["cancelled", "completed"], "completed"),
        (["failed", "running"], "running"),
        (["failing", "completed"], "completed"),
    ],
)
async def test_a_line_is_found_in_whichever_worker_runs_it(known: list[str | None], told: str | None) -> None:
    first, *others = [Deployment(Lines(status)) for status in known]
    found = await ServeJobs(Handle(first, *others)).call(JobsService.line_request, TENANT, "id-0")
    assert found == (None if told is None else {"status": told})


async def test_metrics_of_all_workers_are_added_up_and_those_of_the_database_are_not() -> None:
    def counts(num_ended: int, num_jobs: int, is_up: bool) -> JobsCounts:
        ended = (("status", "succeeded"),)
        return JobsCounts(
            (
                Metric("headway:batch_requests", "", MetricKind.COUNTER, num_ended, ended),
                Metric("headway:jobs", "", MetricKind.GAUGE, num_jobs),
                storage_metric(is_up),
            )
        )

    first, second = (Deployment(None, counts(*numbers)) for numbers in ((3, 7, True), (5, 7, False)))
    handle = Handle(first, second)
    values = {metric.name: metric.value for metric in (await ServeJobs(handle).call(JobsService.metrics)).own}
    assert values == {"headway:batch_requests": 8, "headway:jobs": 7, "headway:jobs_storage_up": 0}
    handle.hangs = True
    assert await ServeJobs(handle).call(JobsService.metrics) == first.counts, "one that answers is better than none"


async def test_an_error_of_the_service_keeps_its_type(service: Service, client: ServeJobs) -> None:
    service.error = Overloaded("too many", 7.0, "max_batches_per_tenant", "rate_limit_exceeded")
    with pytest.raises(Overloaded) as refused:
        await client.call(JobsService.batch, TENANT, "id")
    assert (refused.value.retry_after_s, refused.value.code) == (7.0, "rate_limit_exceeded")
    service.error = UnknownBatch("there is none")
    with pytest.raises(UnknownBatch):
        await client.call(JobsService.batch, TENANT, "id")


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["over gRPC", "by reference"])
async def test_an_internal_failure_is_reported_without_its_message(
    service: Service, client: ServeJobs, is_wrapped: bool
) -> None:
    fault = ValueError("a secret")
    service.error = RayTaskError("batch", "a secret", fault).as_instanceof_cause() if is_wrapped else fault
    with pytest.raises(ServingError) as error:
        await client.call(JobsService.batch, TENANT, "id")
    assert type(error.value) is ServingError and "secret" not in str(error.value)


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("method", "answer"), [("cancel", "as it is"), ("delete_file", None)])
async def test_work_done_before_the_answer_was_lost_is_done(
    service: Service, handle: Handle, client: ServeJobs, method: str, answer: object, lost: BaseException
) -> None:
    service.is_holding = True
    call = asyncio.create_task(client.call(getattr(JobsService, method), TENANT, "id"))
    await until(lambda: len(service.done) == 1)
    service.is_holding = False
    handle.lose(lost)
    assert await call == answer
    assert [name for name, _ in service.done] == [method] * 2


@pytest.mark.parametrize(("method", "error"), [("cancel", BatchNotCancellable), ("delete_file", UnknownFile)])
async def test_work_that_others_have_done_is_an_error(
    service: Service, client: ServeJobs, method: str, error: type[Exception]
) -> None:
    service.done.append((method, {}))
    with pytest.raises(error):
        await client.call(getattr(JobsService, method), TENANT, "id")


async def test_a_batch_submitted_twice_comes_under_one_id() -> None:
    ids: list[str | None] = []

    class LosesTheFirst:
        async def submit(self, batch: Any, batch_id: str | None = None) -> str:
            ids.append(batch_id)
            if len(ids) == 1:
                raise LOST[0]
            return "accepted"

    client = ServeJobs(Handle(Deployment(LosesTheFirst())))
    assert str(await client.call(JobsService.submit, new_batch(), "batch_x")) == "accepted"
    assert ids == ["batch_x"] * 2


async def test_a_wait_repeated_after_a_loss_waits_only_for_the_rest(
    service: Service, handle: Handle, client: ServeJobs
) -> None:
    service.is_holding = True
    call = asyncio.create_task(client.call(JobsService.wait, TENANT, "id", 60.0))
    await until(lambda: len(service.done) == 1)
    service.is_holding = False
    handle.lose(LOST[0])
    assert str(await call) == "done"
    [before_s, after_s] = [arguments["timeout_s"] for _, arguments in service.done]
    assert after_s < before_s <= 60.0


async def test_a_caller_that_leaves_cancels_only_its_call(service: Service, client: ServeJobs) -> None:
    service.is_holding = True
    leaving, staying = (
        asyncio.create_task(client.call(JobsService.wait, TENANT, name, 60.0)) for name in ("leaving", "staying")
    )
    await until(lambda: len(service.done) == 2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: service.num_cancelled > 0)
    assert service.num_cancelled == 1 and not staying.done()
    staying.cancel()


async def test_without_a_jobs_process_a_call_fails_at_its_limit() -> None:
    handle = Handle(None)
    call = asyncio.create_task(ServeJobs(handle, limit_s=0.3).call(JobsService.batch, TENANT, "id"))
    await until(lambda: len(handle.responses) == 1)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(NoReplicaAvailable) as error:
            await call
    assert error.value.retryable
    assert [response.was_cancelled for response in handle.responses] == [True]


def test_a_batch_crosses_a_process_unread() -> None:
    """The ingress gets the lines from the process that has read the body, and hands them to the jobs process."""
    lines = NewLines([NewLine(str(index), {"prompt": f"text {index}"}) for index in range(100)])
    batch = new_batch(lines=lines)
    data = pickle.dumps(batch)
    assert b"NewLine\n" not in data and data.count(b"NewLine") == data.count(b"NewLines")
    assert pickle.loads(pickle.dumps(pickle.loads(data))) == batch
    in_ingress = pickle.loads(pickle.dumps(NewLines.unread(b"unreadable", 100)))
    assert len(in_ingress) == 100
    with pytest.raises(pickle.UnpicklingError):
        in_ingress[0]
