"""Stored responses and conversations: their tenants, their chains, their room, their leases and their plans."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic_core import from_json
from sqlalchemy import Connection, event, func, select, text, update

from replicas.errors import InvalidRequest, Overloaded
from serve_app.jobs.api.errors import UnknownConversation, UnknownPreviousResponse, UnknownResponse
from serve_app.jobs.api.records import BatchKind, BatchStatus, JobsSettings, PageRequest
from serve_app.jobs.api.responses import (
    ConversationRecord,
    EndedResponse,
    ItemPageRequest,
    ItemReference,
    NewResponse,
    ResponseEnd,
    ResponseRun,
    ResponseStatus,
    StoredDelta,
)
from serve_app.jobs.execution.line_runner import store_response
from serve_app.jobs.lifecycle.state_loops import BatchEvents
from serve_app.jobs.responses import SqlResponses
from serve_app.jobs.storage.batch_states import delete_batch
from serve_app.jobs.storage.lines import LeasedLine, LineResult, end_lines, lease_lines
from serve_app.jobs.storage.ownership import reap_owner
from serve_app.jobs.storage.response_outputs import NewOutput, commit_outputs, held_numbers, lease_responses
from serve_app.jobs.storage.rows.batches import batch_record, list_batches, list_lines, select_batch
from serve_app.jobs.storage.rows.conversations import stored_sums
from serve_app.jobs.storage.rows.responses import delete_some, expire_responses
from serve_app.jobs.storage.schema.database import Database
from serve_app.jobs.storage.schema.tables import conversation_items, conversations, response_deltas, responses, stored
from testkit.jobs.database_worlds import MODEL, World, new_batch, success

INGRESS, WORKER = "ingress", "worker"
RUN = ResponseRun('{"fields":{}}', b"\1\0\0\0")
PAGE = ItemPageRequest(10, is_ascending=True)


@pytest.fixture
def world(database: Database) -> World:
    return World(database, JobsSettings(MODEL, max_stored_bytes=2**20))


@pytest.fixture
def store(world: World) -> SqlResponses:
    return SqlResponses(world.context, BatchEvents(lambda bands: None, lambda ids: None), lambda: None)


def item(name: str, size: int = 1) -> str:
    return f'{{"id":"{name}","text":"{"x" * size}"}}'


def new(name: str, tenant: str = "acme", **fields: Any) -> NewResponse:
    return NewResponse(name, tenant, '{"status":"in_progress","error":null}', (item(f"in-{name}"),), **fields)


def end(name: str, status: ResponseStatus = ResponseStatus.COMPLETED) -> ResponseEnd:
    return ResponseEnd(name, status, '{"status":"completed","error":null}', (item(f"out-{name}"),))


async def add(store: SqlResponses, name: str, **fields: Any) -> None:
    """Store a response that an ingress answers, and its end."""
    await store.begin_response(new(name, **fields), INGRESS)
    await store.end_response(end(name), INGRESS)


async def check_sums(world: World) -> None:
    """Check that the sums of the tenants are those of their rows."""

    def sums(connection: Connection) -> dict[str, tuple[int, ...]]:
        rows = connection.execute(select(stored)).all()
        return {row.tenant: (row.num_responses, row.num_conversations, row.num_bytes) for row in rows}

    def counted(connection: Connection, tenant: str) -> tuple[int, ...]:
        pairs = [
            connection.execute(
                select(func.count(), func.coalesce(func.sum(table.c.num_bytes), 0)).where(table.c.tenant == tenant)
            ).one()
            for table in (responses, conversations)
        ]
        return int(pairs[0][0]), int(pairs[1][0]), int(pairs[0][1]) + int(pairs[1][1])

    for tenant, given in (await world.database.read(sums)).items():
        assert given == await world.database.read(lambda c, tenant=tenant: counted(c, tenant)), tenant  # type: ignore[misc]


async def test_a_chain_is_the_conversation_in_its_order(store: SqlResponses, world: World) -> None:
    await add(store, "a")
    await add(store, "b", previous_id="a")
    await store.begin_response(new("c", previous_id="b"), INGRESS)
    with pytest.raises(InvalidRequest, match="can be continued when it has ended"):
        await store.history("acme", "c", None)
    await store.end_response(end("c"), INGRESS)
    names = [f"{place}-{name}" for name in "abc" for place in ("in", "out")]
    assert await store.history("acme", "c", None) == tuple(map(item, names))
    await store.delete_response("acme", "b")
    with pytest.raises(UnknownPreviousResponse, match="`b`"):
        await store.history("acme", "c", None)
    await check_sums(world)


async def test_a_response_of_a_conversation_adds_its_items_once(store: SqlResponses, world: World) -> None:
    conversation = ConversationRecord("conv", 1.0, "{}")
    await store.create_conversation("acme", conversation, [item("first")])
    await add(store, "a", conversation_id="conv")
    await store.end_response(end("a"), INGRESS)
    await store.add_items("acme", "conv", [item("last"), item("first")])
    names = ["first", "in-a", "out-a", "last"]
    assert await store.history("acme", None, "conv") == tuple(map(item, names))
    page = await store.conversation_items("acme", "conv", ItemPageRequest(2, after="out-a"))
    assert (page.items, page.has_more) == ((item("in-a"), item("first")), False)
    await store.delete_item("acme", "conv", "in-a")
    assert await store.history("acme", None, "conv") == tuple(map(item, ["first", "out-a", "last"]))
    await check_sums(world)
    await store.delete_conversation("acme", "conv")
    assert (await world.database.read(lambda c: c.execute(select(conversation_items)).all())) == []
    await check_sums(world)


async def test_another_tenants_objects_are_unknown(store: SqlResponses) -> None:
    await add(store, "a")
    await store.create_conversation("acme", ConversationRecord("conv", 1.0, "{}"), [item("first")])
    of_response: list[Awaitable[object]] = [
        store.response("b", "a"), store.response_run("b", "a"), store.follow_response("b", "a", -1, 0.0),
        store.delete_response("b", "a"), store.cancel_response("b", "a"), store.response_items("b", "a", PAGE),
        store.history("b", "a", None),
    ]  # fmt: skip
    for call in of_response:
        with pytest.raises(UnknownResponse):
            await call
    of_conversation: list[Awaitable[object]] = [
        store.conversation("b", "conv"), store.change_conversation("b", "conv", "{}"),
        store.delete_conversation("b", "conv"), store.add_items("b", "conv", [item("x")]),
        store.conversation_items("b", "conv", PAGE), store.conversation_item("b", "conv", "first"),
        store.delete_item("b", "conv", "first"), store.history("b", None, "conv"),
        store.find_items("b", [ItemReference("first", "a")]),
        store.begin_response(new("c", "b", conversation_id="conv"), INGRESS),
    ]  # fmt: skip
    for call in of_conversation:
        with pytest.raises(UnknownConversation):
            await call
    # A chain does not go through a response of another tenant.
    await add(store, "d", tenant="b", previous_id="a")
    with pytest.raises(UnknownPreviousResponse):
        await store.history("b", "d", None)


async def test_the_oldest_responses_that_have_ended_make_room(store: SqlResponses, world: World) -> None:
    quarter = (item("large", 2**18),)
    for name in "abc":
        world.now += 1
        await store.begin_response(NewResponse(name, "acme", "{}", quarter), INGRESS)
        if name != "a":
            await store.end_response(end(name), INGRESS)
    await store.begin_response(NewResponse("d", "acme", "{}", quarter), INGRESS)
    await check_sums(world)
    assert (await store.response("acme", "a")).status is ResponseStatus.IN_PROGRESS
    with pytest.raises(UnknownResponse):
        await store.response("acme", "b")
    with pytest.raises(Overloaded, match="`max_stored_bytes` is 1048576"):
        await store.begin_response(NewResponse("e", "acme", "{}", (item("huge", 2**20),)), INGRESS)
    await add(store, "f", tenant="other")


def result_of(line: LeasedLine, size: int, **fields: Any) -> LineResult:
    """Return the result of a line whose response has an output of about `size` bytes."""
    ended = ResponseEnd(f"resp-{line.position}", ResponseStatus.COMPLETED, "{}", (item(f"out-{line.position}", size),))
    stored = EndedResponse(NewResponse(ended.id, "acme", "{}", (item("in"),), **fields), ended)
    return replace(success(line), stored=stored)


async def test_a_line_is_stored_with_its_result_or_fails_by_the_limit(store: SqlResponses, world: World) -> None:
    await store.create_conversation("acme", ConversationRecord("conv", 1.0, "{}"), [item("large", 2**20 - 2000)])
    await world.add_owner(WORKER)
    batch_id = (await world.submit(new_batch(3, endpoint="/v1/responses"))).batch.id
    lines = await world.lease(WORKER, batch_id)
    small, large, lost = (
        result_of(lines[0], 500),
        result_of(lines[1], 3000),
        result_of(lines[2], 1, conversation_id="x"),
    )
    keep = partial(store_response, settings=world.settings, now=world.now)
    ended = await world.write(lambda c: end_lines(c, WORKER, [small, large, lost], world.now, keep))
    assert [result.status_code for result in ended.counted] == [200, 429, 404]
    error = from_json(ended.counted[1].error or "")
    assert error["code"] == "storage_limit_exceeded" and "`max_stored_bytes` is 1048576" in error["message"]
    record = batch_record(await world.write(lambda c: select_batch(c, batch_id)))
    assert (record.status, record.counts.completed, record.counts.failed) == (BatchStatus.COMPLETED, 1, 2)
    # The rows that the large one displaced are there again.
    assert small.stored is not None
    assert (await store.response("acme", small.stored.end.id)).output == small.stored.end.output
    await check_sums(world)


async def test_a_line_that_another_worker_has_is_not_stored(store: SqlResponses, world: World) -> None:
    await world.add_owner(WORKER)
    batch_id = (await world.submit(new_batch(1, endpoint="/v1/responses"))).batch.id
    [line] = await world.lease(WORKER, batch_id)
    await world.database.write(lambda c: reap_owner(c, WORKER))
    keep = partial(store_response, settings=world.settings, now=world.now)
    await world.write(lambda c: end_lines(c, WORKER, [result_of(line, 1)], world.now, keep))
    with pytest.raises(UnknownResponse):
        await store.response("acme", "resp-0")


async def test_a_page_of_items_begins_behind_the_item_with_an_id(store: SqlResponses) -> None:
    quoting = '{"id":"b","content":"x","inner":{"id":"c"}}'
    await store.begin_response(NewResponse("a", "acme", "{}", (item("a"), quoting, item("c"), item("d"))), INGRESS)
    page = await store.response_items("acme", "a", ItemPageRequest(10, after="c", is_ascending=True))
    assert page.items == (item("d"),)
    assert (await store.response_items("acme", "a", ItemPageRequest(10, after="e"))).items == ()


async def test_unfinished_responses_have_a_bound_of_their_own(database: Database) -> None:
    world = World(database, JobsSettings(MODEL, max_unfinished_responses=2, max_unfinished_batches=1))
    store = SqlResponses(world.context, BatchEvents(lambda bands: None, lambda ids: None), lambda: None)
    for name in ("a", "b"):
        await store.begin_response(new(name), INGRESS)
    with pytest.raises(Overloaded, match="2 stored responses have not ended; the limit is 2") as caught:
        await store.begin_response(new("c"), INGRESS)
    assert caught.value.reason == "max_responses_per_tenant"
    await store.end_response(end("a"), INGRESS)
    await store.begin_response(new("c"), INGRESS)


async def test_old_responses_are_deleted_when_they_have_ended(store: SqlResponses, world: World) -> None:
    await add(store, "a")
    await store.begin_response(new("b"), INGRESS)
    world.now += world.settings.keep_responses_s
    assert await world.database.write(lambda c: expire_responses(c, world.now, 10)) == 1
    assert (await store.response("acme", "b")).status is ResponseStatus.IN_PROGRESS
    await check_sums(world)


async def test_a_dead_owners_responses_fail_or_are_queued_again(store: SqlResponses, world: World) -> None:
    await store.begin_response(new("a"), INGRESS)
    await store.begin_response(new("b", run=RUN), None)
    await world.add_owner(WORKER)
    (leased,) = await world.database.write(lambda c: lease_responses(c, WORKER, MODEL, 10))
    output = NewOutput(leased.number, StoredDelta(0, b"\1\0\0\0", "one"))
    assert await world.database.write(lambda c: commit_outputs(c, WORKER, [output])) == {leased.number}
    for owner in (INGRESS, WORKER):
        await world.database.write(lambda c, owner=owner: reap_owner(c, owner))  # type: ignore[misc]
    assert (await store.response("acme", "a")).status is ResponseStatus.FAILED
    # The store drops what the dead worker still writes. The deltas are those of the next worker.
    late = NewOutput(leased.number, StoredDelta(1, b"\2\0\0\0", "two"))
    assert await world.database.write(lambda c: commit_outputs(c, WORKER, [late])) == set()
    await world.add_owner("next")
    (again,) = await world.database.write(lambda c: lease_responses(c, "next", MODEL, 10))
    assert again.deltas == (output.delta,)
    last = NewOutput(again.number, StoredDelta(1, b"\3\0\0\0", "three", "stop"), end("b"))
    assert await world.database.write(lambda c: commit_outputs(c, "next", [last])) == set()
    progress = await store.follow_response("acme", "b", 0, 0.0)
    assert (progress.deltas, progress.record.status) == ((last.delta,), ResponseStatus.COMPLETED)
    await check_sums(world)
    await store.delete_response("acme", "b")
    assert (await world.database.read(lambda c: c.execute(select(response_deltas)).all())) == []
    await check_sums(world)


async def test_a_cancelled_response_is_not_written_any_more(store: SqlResponses, world: World) -> None:
    await store.begin_response(new("a", run=RUN), None)
    await world.add_owner(WORKER)
    (leased,) = await world.database.write(lambda c: lease_responses(c, WORKER, MODEL, 10))
    for _ in range(2):
        assert (await store.cancel_response("acme", "a")).status is ResponseStatus.CANCELLED
    last = NewOutput(leased.number, StoredDelta(0, b"\3\0\0\0", "three", "stop"), end("a"))
    assert await world.database.write(lambda c: commit_outputs(c, WORKER, [last])) == set()
    progress = await store.follow_response("acme", "a", -1, 0.0)
    assert (progress.deltas, progress.record.status) == ((), ResponseStatus.CANCELLED)


async def test_all_that_a_tenant_has_stored_is_counted_and_deleted(store: SqlResponses, world: World) -> None:
    for name in ("a", "b"):
        await add(store, name)
    await add(store, "c", tenant="other")
    await store.create_conversation("acme", ConversationRecord("conv", 1.0, "{}"), [item("first")])
    sizes = await store.stored_by_tenant()
    size = sizes["acme"]
    assert (size.num_responses, size.num_conversations, size.oldest_unix_s) == (2, 1, world.now)
    assert await store.stored_by_tenant("acme") == {"acme": size}
    sums = await world.database.read(lambda c: stored_sums(c, 1))
    assert (sums.num_tenants, dict(sums.largest)) == (2, {"acme": size})
    assert (sums.total.num_responses, sums.total.num_conversations, sums.total.oldest_unix_s) == (3, 1, world.now)
    assert sums.total.num_bytes == sum(one.num_bytes for one in sizes.values())
    assert await store.delete_stored("acme") == size
    left = await store.stored_by_tenant()
    assert (left["acme"].num_responses, left["acme"].num_bytes, left["other"].num_responses) == (0, 0, 1)
    await check_sums(world)


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Give the statements that are executed within the context, with their parameters."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: Any, *others: object) -> None:
        is_for_many = others[-1]
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH")):
            seen.append((statement, parameters[0] if is_for_many else parameters))

    event.listen(database._engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(database._engine, "before_cursor_execute", note)


def scans(connection: Connection, statement: str, parameters: Any) -> list[str]:
    """Return the steps of a statement's plan that read a whole table though an index could be used."""
    if connection.dialect.name == "sqlite":
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        steps = [str(row[3]) for row in rows]
        return [step for step in steps if step.startswith("SCAN") and not step.startswith(("SCAN CONST", "SCAN anon"))]
    connection.execute(text("SET LOCAL enable_seqscan = off"))
    rows = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
    return [str(row[0]) for row in rows if "Seq Scan" in row[0]]


async def use_everything(store: SqlResponses, world: World) -> None:
    """Call all that requests call, and what the worker does all the time."""
    await store.create_conversation("acme", ConversationRecord("conv", 1.0, "{}"), [item("first")])
    await add(store, "a", conversation_id="conv")
    await add(store, "b")
    await add(store, "c", previous_id="b")
    await store.begin_response(new("d", run=RUN), None)
    await world.database.write(lambda c: lease_responses(c, WORKER, MODEL, 10))
    number = next(iter(await world.database.read(lambda c: held_numbers(c, WORKER))))
    outputs = [NewOutput(number, StoredDelta(0, b"", "x", "stop"), end("d"))]
    await world.database.write(lambda c: commit_outputs(c, WORKER, outputs))
    await store.response("acme", "a")
    await store.response_run("acme", "d")
    await store.follow_response("acme", "d", -1, 0.0)
    await store.response_items("acme", "a", PAGE)
    await store.history("acme", "c", None)
    await store.history("acme", None, "conv")
    await store.change_conversation("acme", "conv", "{}")
    await store.add_items("acme", "conv", [item("last")])
    await store.conversation_items("acme", "conv", ItemPageRequest(1, after="first"))
    await store.conversation_item("acme", "conv", "last")
    await store.delete_item("acme", "conv", "last")
    await store.cancel_response("acme", "d")
    await world.database.write(lambda c: expire_responses(c, 0.0, 10))
    await store.hold_responses(INGRESS, is_busy=True)
    assert await store.find_items("acme", [ItemReference("first", None), ItemReference("out-b", "b")])
    await store.stored_by_tenant("acme")


async def use_batch(world: World, batch_id: str) -> None:
    """Call all that a message batch and lines of responses call."""
    lines = await world.database.write(lambda c: lease_lines(c, WORKER, {batch_id: 3}))
    keep = partial(store_response, settings=world.settings, now=world.now)
    results = [result_of(line, 1) for line in lines]
    await world.database.write(lambda c: end_lines(c, WORKER, results, world.now, keep))
    for is_ascending in (False, True):
        page = PageRequest(10, batch_id, is_ascending)
        await world.database.read(lambda c, page=page: list_batches(c, "acme", BatchKind.MESSAGES, page))  # type: ignore[misc]
    await world.database.read(lambda c: list_lines(c, "acme", batch_id, -1, 10))
    await world.database.write(lambda c: delete_batch(c, "acme", batch_id))


async def test_no_plan_has_a_scan(store: SqlResponses, world: World) -> None:
    await world.add_owner(WORKER)
    batch_id = (await world.submit(new_batch(3, BatchKind.MESSAGES))).batch.id
    with statements(world.database) as seen:
        await use_everything(store, world)
        await use_batch(world, batch_id)
        # Full: the next response deletes the oldest ones, and deletions cascade.
        await world.database.write(lambda c: c.execute(update(stored).values(num_bytes=2**20)))
        seen.pop()
        await add(store, "e")
        await store.delete_response("acme", "e")
        await store.delete_conversation("acme", "conv")
        await world.database.write(lambda c: delete_some(c, "acme", 10))
    assert len(seen) > 60
    found = {
        statement: steps
        for statement, parameters in dict(seen).items()
        if (steps := await world.database.read(lambda c: scans(c, statement, parameters)))  # noqa: B023
    }
    assert not found
