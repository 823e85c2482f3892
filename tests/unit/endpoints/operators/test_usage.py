"""Usage over HTTP: who sees what, as JSON and as CSV; and what completions are charged."""

import asyncio
import csv
import io
from datetime import date
from pathlib import Path

import pytest

from replicas.errors import NoReplicaAvailable
from replicas.protocol import Band
from replicas.timing.clock import Clock
from serve_app.jobs.api.usage import UsageKey, UsagePage, UsageRow, UsageSums
from serve_app.jobs.usage import UsageLedger
from testkit.http.api import MODEL, MakeApi
from testkit.http.scripted_dispatcher import write_keys

ROWS = (
    UsageRow(UsageKey("2026-03-01", "acme", MODEL, Band.STANDARD), UsageSums(3, 30, 10, 20, 45, 5, 1.25)),
    UsageRow(UsageKey("2026-03-02", "be,ta", MODEL, Band.BATCH), UsageSums(1, 2, 0, 4, 6, 0, 0.5)),
)


async def test_json_and_csv_have_the_same_rows(make_api: MakeApi) -> None:
    api = make_api()
    api.jobs.usage_page = UsagePage(ROWS, has_more=True)
    answer = (await api.http.get("/v1/usage?start_date=2026-03-01&end_date=2026-03-31")).json()
    assert (answer["object"], answer["has_more"], len(answer["data"])) == ("list", True, 2)
    assert answer["data"][0] == {
        "object": "usage", "date": "2026-03-01", "tenant": "acme", "model": MODEL, "band": "standard",
        "num_requests": 3, "input_tokens": 30, "cached_tokens": 10, "output_tokens": 20, "computed_tokens": 45,
        "wasted_tokens": 5, "device_seconds": 1.25,
    }  # fmt: skip
    table = await api.http.get("/v1/usage?start_date=2026-03-01&end_date=2026-03-31&format=csv")
    assert table.headers["content-type"].startswith("text/csv") and table.headers["x-headway-has-more"] == "true"
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert rows == [{name: str(v) for name, v in row.items() if name != "object"} for row in answer["data"]]
    query = api.jobs.usage_queries[0]
    assert (query.first_day, query.last_day, query.tenant) == (date(2026, 3, 1), date(2026, 3, 31), None)


async def test_a_tenant_sees_its_own_usage_and_an_operator_all(make_api: MakeApi, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "acme", "root", operator="root")
    api = make_api(settings={"api_key_file": str(keys)})
    assert (await api.http.get("/v1/usage")).status_code == 401
    for asked, status in (("", 200), ("?tenant=acme", 200), ("?tenant=other", 403)):
        answer = await api.http.get(f"/v1/usage{asked}", headers={"authorization": "Bearer acme"})
        assert answer.status_code == status, answer.text
    for asked in ("", "?tenant=acme"):
        assert (await api.http.get(f"/v1/usage{asked}", headers={"authorization": "Bearer root"})).status_code == 200
    assert [query.tenant for query in api.jobs.usage_queries] == ["acme", "acme", None, "acme"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("start_date=yesterday", "start_date"),
        ("end_date=2026-02-30", "end_date"),
        ("start_date=1768000000", "start_date"),
        ("start_date=2026-03-02&end_date=2026-03-01", "start_date"),
        ("start_date=2020-01-01&end_date=2026-03-01", "start_date"),
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("format=xml", "format"),
        ("tenant=", "tenant"),
        ("group_by=model", "group_by"),
    ],
)
async def test_a_query_that_cannot_be_answered_is_refused(make_api: MakeApi, query: str, param: str) -> None:
    answer = await make_api().http.get(f"/v1/usage?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


async def test_without_days_the_last_month_is_shown(make_api: MakeApi) -> None:
    api = make_api()
    answer = (await api.http.get("/v1/usage")).json()
    days = date.fromisoformat(answer["end_date"]) - date.fromisoformat(answer["start_date"])
    assert days.days == 30
    early = (await api.http.get("/v1/usage?end_date=0001-01-05")).json()
    assert (early["start_date"], early["end_date"]) == ("0001-01-01", "0001-01-05")


async def test_a_failing_database_is_a_503(make_api: MakeApi) -> None:
    api = make_api()
    api.jobs.error = NoReplicaAvailable("the jobs process does not answer")
    assert (await api.http.get("/v1/usage")).status_code == 503


async def test_every_kind_of_completion_is_charged_once(make_api: MakeApi) -> None:
    ledger = UsageLedger(Clock())
    api = make_api(meter=ledger, cached_tokens=1)
    whole = (await api.chat(max_tokens=4)).json()["usage"]
    await api.complete(max_tokens=3, stream=True)
    await api.complete(max_tokens=2, n=3, priority=2)
    await api.post("/v1/batch/sync", {"prompts": ["a", "b"], "max_tokens": 2})
    await api.chat(temperature=9)
    rows = {row.key.band: row for row in ledger.take()}
    assert {row.key.tenant for row in rows.values()} == {"anonymous"} and rows.keys() == {Band.STANDARD, Band.BATCH}
    assert {row.key.model for row in rows.values()} == {MODEL}
    standard, batch = rows[Band.STANDARD].sums, rows[Band.BATCH].sums
    assert (standard.num_requests, standard.output_tokens) == (4, 4 + 3 + 2 * 2)
    assert standard.prompt_tokens > whole["prompt_tokens"] and standard.cached_tokens == 4
    assert (batch.num_requests, batch.output_tokens) == (1, 6)


async def test_a_completion_that_its_client_left_is_waste(make_api: MakeApi) -> None:
    ledger, gate = UsageLedger(Clock()), asyncio.Event()
    api = make_api(meter=ledger, gate=gate, gate_at=2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await api.complete(max_tokens=5, stream=True)
    [row] = ledger.take()
    assert (row.sums.output_tokens, row.sums.computed_tokens) == (2, row.sums.wasted_tokens)
    assert row.sums.wasted_tokens > 0
    gate.set()
    await api.complete(max_tokens=5, stream=True)
    [row] = ledger.take()
    assert row.sums.output_tokens == 5 and row.sums.wasted_tokens == 0 < row.sums.computed_tokens
