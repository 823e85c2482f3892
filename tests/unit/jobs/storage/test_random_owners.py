"""Owners that come, work, die and write too late, batches that expire and are cancelled: every line ends once."""

import contextlib
import json
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from serve_app.jobs.api.errors import BatchNotCancellable
from serve_app.jobs.api.records import BatchKind, BatchStatus, FileRecord, LineStatus
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.validator import OwnershipLost, Validator
from serve_app.jobs.storage.batch_states import CLOSING, cancel_batch, expire_batches
from serve_app.jobs.storage.lines import LeasedLine, LineResult, end_lines, release_lines
from serve_app.jobs.storage.ownership import dead_owners, heartbeat, reap_owner
from serve_app.jobs.storage.rows.batches import BatchRow, batch_record, list_lines, select_batch
from serve_app.jobs.storage.rows.files import add_file
from serve_app.jobs.storage.schema.database import Database
from testkit.jobs.database_worlds import ENDPOINT, MODEL, World, body, failure, new_batch, success
from tests.seeds import Seeds

LEASE_S = 10.0


class RandomWorld(World):
    """World in which anything happens in any order; a dead owner goes on writing the lines that it holds."""

    def __init__(self, database: Database, rng: random.Random) -> None:
        super().__init__(database)
        self.rng = rng
        self.batch_ids: list[str] = []
        self.num_lines: dict[str, int] = {}
        self.held: dict[str, list[LeasedLine]] = {}
        self.holders: dict[tuple[str, int], tuple[str, int]] = {}
        """Holder of each leased line: an owner, at an attempt."""
        self.silent: set[str] = set()
        self.has_no_faults = False
        self.ended: Counter[tuple[str, int]] = Counter()
        """Number of counted results of each line."""

    async def play(self, num_moves: int) -> None:
        moves = [
            self.new_owner, self.silence, self.submit_lines, self.submit_file, self.take, self.take, self.take,
            self.take, self.end, self.end, self.give_back, self.give_back, self.cancel, self.pass_time, self.pass_time,
            self.reap, self.expire, self.validate, self.close,
        ]  # fmt: skip
        for _ in range(num_moves):
            await self.rng.choice(moves)()

    async def finish(self) -> None:
        """Let one good owner bring everything to its end."""
        self.has_no_faults = True
        self.now += 2 * LEASE_S
        await self.reap()
        self.silent |= self.held.keys()
        await self.new_owner()
        owner = self.alive()
        assert owner is not None
        for _ in range(len(self.batch_ids)):
            await self.validate()
        for batch_id in self.batch_ids:
            await self.end_all(owner, [success(line) for line in await self.take_lines(owner, batch_id, 100)])
        for _ in range(len(self.batch_ids)):
            await self.close()
        rows = await self.database.read(lambda c: [select_batch(c, batch_id) for batch_id in self.batch_ids])
        assert all(BatchStatus(row.status).is_final for row in rows)

    async def new_owner(self) -> None:
        owner = f"owner-{len(self.held)}"
        self.held[owner] = []
        await self.add_owner(owner)

    def alive(self) -> str | None:
        owners = sorted(self.held.keys() - self.silent)
        return self.rng.choice(owners) if owners else None

    def dies(self, owner: str) -> bool:
        """Let the owner die at random, with the lines that it holds; return True if it died."""
        is_dead = not self.has_no_faults and self.rng.random() < 0.3
        if is_dead:
            self.silent.add(owner)
        return is_dead

    async def silence(self) -> None:
        if (owner := self.alive()) is not None:
            self.silent.add(owner)

    async def submit_lines(self) -> None:
        number = self.rng.randrange(1, 6)
        kind = BatchKind.JOB if number == 1 else BatchKind.PROMPTS
        await self.accept(new_batch(number, kind, **self.options()), number)

    async def submit_file(self) -> None:
        number, file_id = self.rng.randrange(0, 8), f"file-{len(self.batch_ids)}"
        texts = [
            json.dumps({"custom_id": f"line-{index}", "method": "POST", "url": ENDPOINT, "body": body(index)})
            for index in range(number)
        ]
        self.files.files[file_id] = "\n".join(texts).encode()
        record = FileRecord(file_id, "acme", "batch", "in.jsonl", 1, self.now)
        await self.write(lambda c: add_file(c, record))
        await self.accept(new_batch(0, BatchKind.FILE, input_file_id=file_id, **self.options()), number)

    def options(self) -> dict[str, Any]:
        return {
            "window_s": self.rng.choice([None, None, 15.0, 60.0]),
            "callback_url": self.rng.choice([None, "http://x/y"]),
        }

    async def accept(self, new: object, num_lines: int) -> None:
        submission = await self.submit(new)  # type: ignore[arg-type]
        self.batch_ids.append(submission.batch.id)
        self.num_lines[submission.batch.id] = num_lines

    def some_batch(self) -> str | None:
        return self.rng.choice(self.batch_ids[-3:]) if self.batch_ids else None

    async def take(self) -> None:
        owner, batch_id = self.alive(), self.some_batch()
        if owner is not None and batch_id is not None:
            self.held[owner] += await self.take_lines(owner, batch_id, self.rng.randrange(1, 4))

    async def take_lines(self, owner: str, batch_id: str, limit: int) -> list[LeasedLine]:
        lines = await self.lease(owner, batch_id, limit)
        for line in lines:
            assert (line.batch_id, line.position) not in self.holders, "somebody has it"
            self.holders[line.batch_id, line.position] = (owner, line.attempt)
        return lines

    async def end_all(self, owner: str, results: list[LineResult]) -> None:
        for result in (await self.write(lambda c: end_lines(c, owner, results, self.now))).counted:
            line = result.line
            assert self.holders.pop((line.batch_id, line.position)) == (owner, line.attempt), "it was another's"
            self.ended[line.batch_id, line.position] += 1

    def freed(self, owner: str, lines: list[LeasedLine] | None = None) -> None:
        """Forget that an owner holds these lines, or any."""
        attempts = None if lines is None else {(line.batch_id, line.position, line.attempt) for line in lines}
        for (batch_id, position), (holder, attempt) in list(self.holders.items()):
            if holder == owner and (attempts is None or (batch_id, position, attempt) in attempts):
                del self.holders[batch_id, position]

    async def end(self) -> None:
        """Let any owner write results, even one that is declared dead."""
        owners = [owner for owner, its in self.held.items() if its]
        if not owners:
            return
        owner = self.rng.choice(owners)
        lines = self.rng.sample(self.held[owner], self.rng.randrange(1, len(self.held[owner]) + 1))
        await self.end_all(owner, [self.rng.choice([success, success, failure])(line) for line in lines])
        if self.rng.random() < 0.7:  # else it writes them again one day
            self.held[owner] = [line for line in self.held[owner] if line not in lines]

    async def give_back(self) -> None:
        if (owner := self.alive()) is not None:
            lines = self.held[owner]
            await self.write(lambda c: release_lines(c, owner, lines))
            self.freed(owner, lines)

    async def cancel(self) -> None:
        if (batch_id := self.some_batch()) is not None and self.rng.random() < 0.3:
            with contextlib.suppress(BatchNotCancellable):
                await self.write(lambda c: cancel_batch(c, "acme", batch_id, self.now))

    async def pass_time(self) -> None:
        self.now += self.rng.uniform(0.0, 6.0)
        for owner in sorted(self.held.keys() - self.silent):
            if not await self.write(partial(heartbeat, owner=owner, now=self.now)):
                self.silent.add(owner)

    async def reap(self) -> None:
        for owner in await self.database.read(lambda c: dead_owners(c, "nobody", self.now, LEASE_S)):
            await self.write(partial(reap_owner, owner=owner))
            self.freed(owner)

    async def expire(self) -> None:
        await self.write(lambda c: expire_batches(c, MODEL, self.now))

    async def claim_some(self, *statuses: BatchStatus) -> tuple[BatchRow, str] | None:
        """Claim a batch for some owner; return both, or None if there is none or the owner dies at once."""
        owner = self.alive()
        if owner is None:
            return None
        batch = await self.claim(owner, *statuses)
        if batch is None or self.dies(owner):
            return None
        return batch, owner

    async def validate(self) -> None:
        if (claimed := await self.claim_some(BatchStatus.VALIDATING)) is not None:
            try:
                await Validator(self.context).validate(*claimed)
            except OwnershipLost:
                raise AssertionError("nobody else was there") from None

    async def close(self) -> None:
        if (claimed := await self.claim_some(*CLOSING)) is None:
            return
        batch, owner = claimed
        finalizer = Finalizer(self.context, Counter())
        self.files.num_failures = int(self.dies(owner))
        with contextlib.suppress(OSError):
            await finalizer.finalize(batch, owner)
        self.files.num_failures = 0


@pytest.mark.random_worlds(12)
async def test_every_line_ends_exactly_once(database: Database, seeds: Seeds) -> None:
    for seed in seeds:
        world = RandomWorld(database, random.Random(seed))
        await world.play(100)
        await world.finish()
        assert all(number == 1 for number in world.ended.values())
        for batch_id in world.batch_ids:
            await check_outcome(world, batch_id)


async def check_outcome(world: RandomWorld, batch_id: str) -> None:
    """Every line is in the output or in the errors, once, and the counts say so."""
    record = batch_record(await world.database.read(lambda c: select_batch(c, batch_id)))
    if record.in_progress_unix_s is None:
        assert record.counts.total == 0
        return
    expected = [f"line-{index}" for index in range(world.num_lines[batch_id])]
    if record.kind is BatchKind.FILE:
        outputs, errors = (custom_ids(world, file_id) for file_id in (record.output_file_id, record.error_file_id))
    else:
        lines = await world.database.read(lambda c: list_lines(c, "acme", batch_id, -1, 100))
        outputs = [line.custom_id for line in lines if line.status is LineStatus.SUCCEEDED]
        errors = [line.custom_id for line in lines if line.status is not LineStatus.SUCCEEDED]
    assert sorted(outputs + errors) == expected
    assert (len(outputs), len(errors)) == (record.counts.completed, record.counts.failed)


def custom_ids(world: RandomWorld, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    return [json.loads(line)["custom_id"] for line in world.files.files[file_id].splitlines()]
