"""Usage: reports are added up, each once, and are found by day, tenant and model."""

import random
from collections import defaultdict
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from replicas.errors import NoReplicaAvailable, ServingError
from replicas.protocol import Band
from replicas.timing.clock import Clock
from serve_app.jobs.api.usage import UsageKey, UsagePage, UsageQuery, UsageReport, UsageRow, UsageSums
from serve_app.jobs.storage.rows.usage import add_report, find_usage
from serve_app.jobs.usage import OTHERS, UsageLedger, UsageReporter
from testkit.jobs.database_worlds import World

FIRST, LAST = date(2026, 1, 1), date(2026, 12, 31)


def key(tenant: str = "acme", day: str = "2026-03-01", model: str = "m", band: Band = Band.STANDARD) -> UsageKey:
    return UsageKey(day, tenant, model, band)


def sums(number: int = 1) -> UsageSums:
    return UsageSums(1, 10 * number, number, 5, 14, 2, 0.25 * number)


def report(number: int, *rows: UsageRow, reporter_id: str = "a") -> UsageReport:
    return UsageReport(reporter_id, number, rows)


async def apply(world: World, usage: UsageReport, now: float = 1.0) -> None:
    await world.write(lambda connection: add_report(connection, usage, now))


async def found(world: World, tenant: str | None = None, model: str | None = None, **fields: Any) -> UsagePage:
    query = replace(UsageQuery(FIRST, LAST, tenant, model, limit=100), **fields)
    return await world.database.read(lambda connection: find_usage(connection, query))


async def test_reports_of_several_processes_are_added_up(world: World) -> None:
    for reporter_id in ("a", "b"):
        for number in (1, 2):
            rows = UsageRow(key(), sums(number)), UsageRow(key("beta"), sums())
            await apply(world, report(number, *rows, reporter_id=reporter_id))
    page = await found(world)
    assert [(row.key.tenant, row.sums.num_requests, row.sums.prompt_tokens) for row in page.rows] == [
        ("acme", 4, 60),
        ("beta", 4, 40),
    ]
    assert page.rows[0].sums.device_s == 1.5


async def test_a_report_that_comes_again_counts_once(world: World) -> None:
    for number in (1, 1, 2, 1, 2):
        await apply(world, report(number, UsageRow(key(), sums())))
    assert (await found(world)).rows == (UsageRow(key(), UsageSums(2, 20, 2, 10, 28, 4, 0.5)),)


async def test_usage_is_found_by_day_tenant_model_and_in_order(world: World) -> None:
    keys = [
        UsageKey(day, tenant, model, band)
        for day in ("2026-03-01", "2026-03-02", "2026-04-01")
        for tenant in ("acme", "beta")
        for model in ("m", "n")
        for band in (Band.INTERACTIVE, Band.BATCH)
    ]
    shuffled = random.Random(1).sample(keys, len(keys))
    await apply(world, report(1, *(UsageRow(each, sums()) for each in shuffled)))
    assert [row.key for row in (await found(world)).rows] == keys
    page = await found(world, "beta", "n", first_day=date(2026, 3, 2), last_day=date(2026, 4, 1))
    assert [row.key for row in page.rows] == [
        each for each in keys if (each.tenant, each.model) == ("beta", "n") and each.day != "2026-03-01"
    ]
    first = await found(world, limit=5)
    assert ([row.key for row in first.rows], first.has_more) == (keys[:5], True)
    assert not (await found(world, limit=len(keys))).has_more


async def test_processes_that_ended_long_ago_are_forgotten(world: World) -> None:
    await apply(world, report(5, UsageRow(key(), sums())), now=0.0)
    await apply(world, report(1, reporter_id="new"), now=8 * 86_400.0)
    # Forgotten, so that its number counts anew; a process that lives reports within seconds.
    await apply(world, report(5, UsageRow(key(), sums())), now=8 * 86_400.0)
    assert (await found(world)).rows[0].sums.num_requests == 2


class Unreliable:
    """Jobs process that is away at times, and whose answers are lost at times."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)

    async def __call__(self, usage: UsageReport) -> None:
        fate = self.rng.random()
        if fate < 0.3:
            raise NoReplicaAvailable("away")
        await apply(self.world, usage)
        if fate < 0.6:
            raise ServingError("the answer is lost")


async def test_nothing_is_lost_or_counted_twice_while_the_jobs_process_comes_and_goes(world: World) -> None:
    for seed in range(5):
        rng, ledger = random.Random(seed), UsageLedger(Clock())
        reporter = UsageReporter(ledger, Unreliable(world, seed), period_s=60.0)
        expected: dict[UsageKey, UsageSums] = defaultdict(UsageSums)
        for _ in range(60):
            added = key(rng.choice("xyz") + str(seed)), sums(rng.randrange(1, 9))
            ledger.add(*added)
            expected[added[0]].add(added[1])
            if rng.random() < 0.3:
                await reporter.flush()
        while not await reporter.flush():
            pass
        rows = (await found(world)).rows
        assert {row.key: asdict(row.sums) for row in rows if row.key in expected} == {
            each: asdict(total) for each, total in expected.items()
        }


async def test_tenants_beyond_the_limit_are_added_up_together(world: World) -> None:
    ledger = UsageLedger(Clock())
    for number in range(10_010):
        ledger.add(key(f"t{number}"), sums())
    rows = ledger.take()
    assert len(rows) == 10_001 and sum(row.sums.num_requests for row in rows) == 10_010
    assert {row.key.tenant: row.sums.num_requests for row in rows}[OTHERS] == 10
    assert ledger.take() == ()
