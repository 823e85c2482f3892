"""Webhooks: signed with a secret drawn once, tried again for 72 hours; a receiver that hangs delays nobody else's."""

import asyncio
import json
import random
import stat
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import time as unix_s
from typing import Any

import openai
import pytest

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind, BatchRecord, BatchStatus, RequestCounts
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.client import DeliveryFailed, WebhookClient
from serve_app.jobs.webhooks.events import Delivery, delivery_of, event_id_of, host_of
from serve_app.jobs.webhooks.guard import WebhookGuard
from serve_app.jobs.webhooks.receivers import NONE_CLOSED, Closed, Receiver, ReceiverLimits, Receivers
from serve_app.jobs.webhooks.sender import (
    MAX_AGE_S,
    AttemptOutcome,
    Outbox,
    SendingLimits,
    WebhookSender,
    next_attempt_unix_s,
)
from serve_app.jobs.webhooks.signing import WebhookSigner, load_or_create_secret, new_secret
from testkit.jobs.database_worlds import SetTime
from testkit.jobs.webhook_receivers import Answer, endless_body, endless_headers, receiving, silence, status
from testkit.limits import LIMIT_S, until


def batch(status: BatchStatus, kind: BatchKind = BatchKind.FILE, counts: RequestCounts | None = None) -> BatchRecord:
    made = BatchRecord(
        id="batch_7", kind=kind, tenant="t", endpoint="/v1/completions", band=Band.BATCH, status=status,
        counts=counts or RequestCounts(1, 1, 0), created_unix_s=1000.5, expires_unix_s=None, input_file_id=None,
        output_file_id=None, error_file_id=None, errors=(), metadata=None, callback_url="http://x", request_id="req-1",
    )  # fmt: skip
    ended: dict[str, Any] = {f"{status.value}_unix_s": 2000.7}
    return replace(made, **ended)


def delivery(number: int = 1, host: str = "good.test", **changes: Any) -> Delivery:
    made = Delivery(f"evt_{number}", "batch_7", "t", "batch.completed", f"http://{host}/hook", "{}", 0, 0.0)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("ended", "event_type"),
    [
        (batch(BatchStatus.COMPLETED), "batch.completed"),
        (batch(BatchStatus.COMPLETED, BatchKind.PROMPTS, RequestCounts(2, 1, 1)), "batch.completed"),
        (batch(BatchStatus.FAILED), "batch.failed"),
        (batch(BatchStatus.EXPIRED), "batch.expired"),
        (batch(BatchStatus.CANCELLED), "batch.cancelled"),
        (batch(BatchStatus.COMPLETED, BatchKind.JOB), "response.completed"),
        (batch(BatchStatus.COMPLETED, BatchKind.JOB, RequestCounts(1, 0, 1)), "response.failed"),
        (batch(BatchStatus.FAILED, BatchKind.JOB), "response.failed"),
        (batch(BatchStatus.EXPIRED, BatchKind.JOB), "response.incomplete"),
        (batch(BatchStatus.CANCELLED, BatchKind.JOB), "response.cancelled"),
    ],
)
def test_the_event_is_one_that_openai_has(ended: BatchRecord, event_type: str) -> None:
    made = delivery_of(ended, "http://x", "evt_1", 2001.0)
    assert made == Delivery("evt_1", "batch_7", "t", event_type, "http://x", made.body, 0, 2001.0)
    assert json.loads(made.body) == {
        "id": "evt_1",
        "object": "event",
        "created_at": 2000,
        "type": event_type,
        "data": {"id": "batch_7", "request_id": "req-1"},
    }


def test_a_batch_that_ends_again_after_a_backup_was_restored_has_the_same_event() -> None:
    ended = batch(BatchStatus.COMPLETED)
    ids = [event_id_of(each) for each in (ended, replace(ended, completed_unix_s=3000.0), batch(BatchStatus.FAILED))]
    assert ids[0] == ids[1] != ids[2] and ids[0] != event_id_of(replace(ended, id="batch_8"))


async def posted(answer: Answer, sent: Delivery, secret: str | None = None, timeout_s: float = 5.0):
    """Post `sent` once; return the received request, and the error if it counts as not delivered."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    guard = WebhookGuard(AllowedHosts.parse("good.test"), resolve)
    client = WebhookClient(WebhookSigner(secret or new_secret()), guard, timeout_s=timeout_s)
    async with receiving(answer) as receiver:
        try:
            await client.post(replace(sent, url=f"http://good.test:{receiver.port}/hook?x=1"))
            error = None
        except DeliveryFailed as not_delivered:
            error = str(not_delivered)
        finally:
            await client.close()
    [request] = receiver.requests
    return request, error


@pytest.mark.parametrize("kind", [BatchKind.FILE, BatchKind.JOB])
async def test_the_stock_client_unwraps_what_is_sent(kind: BatchKind) -> None:
    secret = new_secret()
    made = delivery_of(batch(BatchStatus.COMPLETED, kind), "http://x", "evt_9", 2001.0)
    request, error = await posted(status(204), made, secret)
    assert error is None and request.path == "/hook?x=1"
    assert request.headers["content-type"] == "application/json"
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    unwrapped = client.webhooks.unwrap(request.body, request.headers)
    assert unwrapped.type == made.event and unwrapped.id == request.headers["webhook-id"] == "evt_9"
    assert unwrapped.data.id == "batch_7"  # type: ignore[union-attr]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(request.body + " ", request.headers)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(request.body, request.headers, secret=new_secret())


def test_a_signature_tells_when_it_was_made() -> None:
    secret = new_secret()
    headers = WebhookSigner(secret).headers("evt_1", "{}", unix_s() - 301.0)
    with pytest.raises(openai.InvalidWebhookSignatureError, match="too old"):
        openai.OpenAI(api_key="none").webhooks.verify_signature("{}", headers, secret=secret)


@pytest.mark.parametrize("secret", ["", "whsec_", "secret", "whsec_AAAA", "whsec_!" + "A" * 40, "A" * 44])
def test_a_secret_with_two_readings_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="at least 24 bytes") as caught:
        WebhookSigner(secret)
    assert "AAAA" not in str(caught.value)


def test_a_secret_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = load_or_create_secret(path)
    assert load_or_create_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["secret"]
    assert load_or_create_secret(tmp_path / "other") != secret
    WebhookSigner(secret)


def test_an_operators_own_secret_in_the_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("whsec_mine\n")
    assert load_or_create_secret(tmp_path / "secret") == "whsec_mine"


def test_concurrent_readers_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: load_or_create_secret(tmp_path / "secret"), range(8)))
    assert len(secrets) == 1


@pytest.mark.parametrize("code", [200, 201, 202, 204, 299])
async def test_any_2xx_is_delivered(code: int) -> None:
    assert (await posted(status(code), delivery()))[1] is None


@pytest.mark.parametrize("code", [300, 304, 400, 404, 410, 429, 500, 503])
async def test_any_other_status_is_not(code: int) -> None:
    assert (await posted(status(code), delivery()))[1] == f"status {code}"


async def test_a_receiver_that_never_answers_is_given_up() -> None:
    assert (await posted(silence, delivery(), timeout_s=0.1))[1] == "no answer within 0.1 s"


async def test_no_more_is_read_than_needed() -> None:
    async with asyncio.timeout(LIMIT_S):
        assert (await posted(endless_body, delivery()))[1] is None
        assert (await posted(endless_headers, delivery()))[1] is not None


def test_delays_double_up_to_four_hours_and_end_after_72() -> None:
    tried, now, delays = delivery(), 0.0, []
    while (next_at := next_attempt_unix_s(tried, now, random.Random(1))) is not None:
        delays.append(next_at - now)
        tried, now = replace(tried, num_attempts=tried.num_attempts + 1), next_at
    assert now <= MAX_AGE_S < now + 1.25 * 4 * 3600
    for number, delay_s in enumerate(delays):
        expected_s = min(4 * 3600, 5 * 2**number)
        assert 0.75 * expected_s <= delay_s <= 1.25 * expected_s
    assert len({next_attempt_unix_s(delivery(), 0.0, random.Random(seed)) for seed in range(9)}) == 9


class MemoryOutbox:
    """Outbox in memory whose calls may fail for a while."""

    def __init__(self, *pending: Delivery) -> None:
        self.pending = {each.id: each for each in pending}
        self.next_unix_s: dict[str, float | None] = dict.fromkeys(self.pending, 0.0)
        self.errors: dict[str, str] = {}
        self.done: list[str] = []
        self.num_failing_calls = 0
        self.taken: set[str] = set()
        """Deliveries that another worker claims first."""

    async def due_deliveries(self, now_unix_s: float, limit: int, closed: Closed = NONE_CLOSED) -> list[Delivery]:
        self._maybe_fail()
        due = [(at, key) for key, at in self.next_unix_s.items() if at is not None and at <= now_unix_s]
        deliveries = [self.pending[key] for _, key in sorted(due)]
        return [
            each
            for each in deliveries
            if Receiver(each.tenant, host_of(each.url)) not in closed.receivers
            and each.tenant not in closed.tenants
            and each.id not in closed.delivery_ids
        ][:limit]

    async def claim(self, delivery_ids: Sequence[str], now_unix_s: float) -> set[str]:
        self._maybe_fail()
        return set(delivery_ids) - self.taken

    async def delivered(self, delivery: Delivery) -> None:
        self._maybe_fail()
        self.next_unix_s[delivery.id] = None
        self.done.append(delivery.id)

    async def delivery_failed(self, delivery: Delivery, next_attempt_unix_s: float | None, error: str) -> None:
        self._maybe_fail()
        made = self.pending[delivery.id]
        self.pending[delivery.id] = replace(made, num_attempts=made.num_attempts + 1)
        self.next_unix_s[delivery.id] = next_attempt_unix_s
        self.errors[delivery.id] = error

    def _maybe_fail(self) -> None:
        if self.num_failing_calls > 0:
            self.num_failing_calls -= 1
            raise OSError("the database is away")


class Hosts:
    """Hosts that fail a given number of times, answer when the test lets them, or hang up to the time limit."""

    def __init__(self, num_failures: int = 0, error: Exception | None = None, slow: Sequence[str] = ()) -> None:
        self.posted: list[Delivery] = []
        self.under_way: list[str] = []
        self.most_under_way = 0
        self._num_failures = num_failures
        self._error = error or DeliveryFailed("status 500", has_answered=True)
        self._slow = {host: asyncio.Event() for host in slow}
        self.hanging: set[str] = set()

    async def post(self, sent: Delivery) -> None:
        host = host_of(sent.url)
        self.posted.append(sent)
        self.under_way.append(host)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            await asyncio.sleep(0)
            if host in self._slow:
                await self._slow[host].wait()
            if host in self.hanging:
                raise DeliveryFailed("no answer within 15 s")
        finally:
            self.under_way.remove(host)
        if len(self.posted) <= self._num_failures:
            raise self._error

    def answer(self, host: str) -> None:
        self._slow[host].set()


@asynccontextmanager
async def sending(
    outbox: Outbox,
    hosts: Hosts,
    max_parallel: int = 8,
    time: SetTime | None = None,
    receivers: ReceiverLimits | None = None,
) -> AsyncIterator[WebhookSender]:
    """Run a sender within the context; it looks for work every millisecond."""
    limits = SendingLimits(max_parallel, receivers or ReceiverLimits(), poll_period_s=0.001)
    sender = WebhookSender(outbox, hosts.post, random.Random(0), (time or SetTime()).clock, limits)
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_due_deliveries_are_sent_and_recorded() -> None:
    outbox = MemoryOutbox(*(delivery(number, f"host-{number}") for number in range(5)))
    async with sending(outbox, Hosts()) as sender:
        await until(lambda: len(outbox.done) == 5)
        outbox.pending["evt_9"], outbox.next_unix_s["evt_9"] = delivery(9), 0.0
        await until(lambda: "evt_9" in outbox.done)
    assert sender.outcomes[AttemptOutcome.DELIVERED] == 6


async def test_each_attempt_has_the_same_id_until_72_hours_are_over() -> None:
    outbox, hosts, time = MemoryOutbox(delivery()), Hosts(num_failures=1000), SetTime()
    async with sending(outbox, hosts, time=time) as sender:
        while True:
            seen = outbox.pending["evt_1"].num_attempts
            await until(lambda seen=seen: outbox.pending["evt_1"].num_attempts > seen)  # type: ignore[misc]
            if (due := outbox.next_unix_s["evt_1"]) is None:
                break
            time.now = due
    assert {each.id for each in hosts.posted} == {"evt_1"} and 20 < len(hosts.posted) < 60
    assert MAX_AGE_S - 5 * 3600 < time.now <= MAX_AGE_S
    assert outbox.errors["evt_1"] == "status 500" and outbox.done == []
    assert sender.outcomes == {
        AttemptOutcome.DELIVERED: 0, AttemptOutcome.FAILED: len(hosts.posted) - 1, AttemptOutcome.DEAD: 1,
    }  # fmt: skip


async def test_a_failure_is_followed_by_a_delivery() -> None:
    outbox, hosts, time = MemoryOutbox(delivery()), Hosts(num_failures=2), SetTime()
    async with sending(outbox, hosts, time=time):
        for _ in range(3):
            await until(lambda: not hosts.under_way and outbox.next_unix_s["evt_1"] != time.now)
            time.now = outbox.next_unix_s["evt_1"] or 0.0
        await until(lambda: outbox.done == ["evt_1"])
    assert len(hosts.posted) == 3


async def test_a_slow_host_with_many_deliveries_delays_no_other() -> None:
    slow = [delivery(number, "slow.test") for number in range(100)]
    others = [delivery(number, f"host-{number}") for number in range(100, 110)]
    outbox, hosts = MemoryOutbox(*slow, *others), Hosts(slow=["slow.test"])
    async with sending(outbox, hosts, max_parallel=4, receivers=ReceiverLimits(2, 4)):
        await until(lambda: len(outbox.done) == 10)
        assert [each.id for each in hosts.posted if "slow" in each.url] == ["evt_0", "evt_1"]
        assert hosts.most_under_way <= 4
        hosts.answer("slow.test")
        await until(lambda: len(outbox.done) == 110)


def owed(numbers: range, tenant: str, host: str) -> list[Delivery]:
    return [replace(delivery(number, host), tenant=tenant) for number in numbers]


async def test_a_receiver_that_hangs_delays_nobody_elses_webhooks() -> None:
    hanging = owed(range(300), "a", "hang.test")
    others = [*owed(range(300, 301), "a", "good.test"), *owed(range(301, 302), "b", "hang.test")]
    outbox, hosts, time = MemoryOutbox(*hanging, *others), Hosts(slow=["hang.test"]), SetTime()

    def attempts(tenant: str) -> list[str]:
        return [each.id for each in hosts.posted if each.tenant == tenant and "hang" in each.url]

    async with sending(outbox, hosts, max_parallel=64, time=time):
        await until(lambda: outbox.done == ["evt_300"] and bool(attempts("b")))
        assert len(attempts("a")) == 4 and hosts.most_under_way == 6
        hosts.hanging = {"hang.test"}
        hosts.answer("hang.test")
        await until(lambda: "evt_301" in outbox.errors and not hosts.under_way)
        for num_attempts, pause_s in ((5, 5.0), (6, 10.0), (7, 20.0), (8, 40.0), (9, 60.0), (10, 60.0)):
            await asyncio.sleep(0.01)
            assert len(attempts("a")) == num_attempts - 1, "it pauses"
            time.now += pause_s
            await until(lambda n=num_attempts: len(attempts("a")) == n and not hosts.under_way)  # type: ignore[misc]
        await asyncio.sleep(0.01)
        hosts.hanging = set()
        time.now += 60.0
        await until(lambda: len(outbox.done) >= 290)
        assert len(hosts.posted) < 320, "no attempt was made in vain while it hung"


async def test_one_tenant_leaves_places_to_others() -> None:
    slow = [f"slow-{number}.test" for number in range(50)]
    much = [replace(delivery(number, host), tenant="a") for number, host in enumerate(slow)]
    outbox, hosts = MemoryOutbox(*much, *owed(range(50, 51), "b", "good.test")), Hosts(slow=slow)
    async with sending(outbox, hosts, max_parallel=10, receivers=ReceiverLimits(4, 6)):
        await until(lambda: outbox.done == ["evt_50"])
        assert len(hosts.under_way) == 6


def test_the_counts_of_receivers_survive_any_order_of_attempts() -> None:
    rng, time = random.Random(5), SetTime()
    receivers = Receivers(ReceiverLimits(2, 3), time.clock.monotonic)
    running: list[Receiver] = []
    for _ in range(3000):
        receiver = Receiver(rng.choice("ab"), rng.choice("xyz"))
        closed = receivers.closed()
        is_closed = receiver in closed.receivers or receiver.tenant in closed.tenants
        if rng.random() < 0.5:
            assert receivers.begin(receiver) is not is_closed
            running += [] if is_closed else [receiver]
        elif running:
            receivers.end(running.pop(rng.randrange(len(running))), rng.random() < 0.6)
        time.now += rng.choice([0.0, 1.0, 30.0])
        assert max(Counter(running).values(), default=0) <= 2
        assert max(Counter(one.tenant for one in running).values(), default=0) <= 3
        receivers.check_invariants()


async def test_a_database_outage_delays_webhooks_and_repeats_none() -> None:
    outbox, hosts = MemoryOutbox(delivery()), Hosts()
    outbox.num_failing_calls = 3
    async with sending(outbox, hosts):
        await until(lambda: outbox.done == ["evt_1"])
    outbox, hosts = MemoryOutbox(delivery()), Hosts(slow=["good.test"])
    async with sending(outbox, hosts):
        await until(lambda: hosts.under_way == ["good.test"])
        outbox.num_failing_calls = 10
        hosts.answer("good.test")
        await until(lambda: outbox.done == ["evt_1"])
    assert len(hosts.posted) == 1


async def test_what_another_worker_has_claimed_is_left_to_it() -> None:
    outbox, hosts = MemoryOutbox(*(delivery(number) for number in range(6))), Hosts()
    outbox.taken = {"evt_0", "evt_1", "evt_2", "evt_3"}
    async with sending(outbox, hosts, receivers=ReceiverLimits(5, 5)):
        await until(lambda: sorted(outbox.done) == ["evt_4", "evt_5"])
        assert len(hosts.posted) == 2
        outbox.taken = set()
        await until(lambda: len(outbox.done) == 6)
    assert len(hosts.posted) == 6


async def test_an_internal_error_counts_as_a_failed_attempt() -> None:
    outbox = MemoryOutbox(delivery())
    async with sending(outbox, Hosts(num_failures=1, error=RuntimeError("ours"))):
        await until(lambda: "evt_1" in outbox.errors)
    assert outbox.errors["evt_1"] == "internal error: RuntimeError"
    assert outbox.next_unix_s["evt_1"] is not None


async def test_an_interrupted_attempt_stays_due() -> None:
    outbox, hosts = MemoryOutbox(delivery()), Hosts(slow=["good.test"])
    async with sending(outbox, hosts):
        await until(lambda: hosts.under_way == ["good.test"])
    assert hosts.under_way == [] and outbox.done == []
    async with sending(outbox, Hosts()):
        await until(lambda: outbox.done == ["evt_1"])


async def test_a_malformed_host_delays_no_other_delivery() -> None:
    outbox = MemoryOutbox(replace(delivery(1), url="https://xn--/"), delivery(2, "host"))
    async with sending(outbox, Hosts()):
        await until(lambda: "evt_2" in outbox.done)
    assert host_of("https://xn--/") == "xn--"
    assert host_of("https://B\u00fccher.example/") == "xn--bcher-kva.example"
