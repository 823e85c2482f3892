"""Trace context of a batch: from its submission through the database to the receiver of its webhook."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from serve_app.jobs.api.records import BatchKind
from serve_app.jobs.storage.deliveries import SqlOutbox
from serve_app.jobs.storage.lines import end_lines
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.storage.rows.batch_queue import open_batches
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.client import DeliveryFailed, WebhookClient
from serve_app.jobs.webhooks.events import Delivery
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from serve_app.jobs.webhooks.signing import WebhookSigner, new_secret
from serve_app.tracing.context import TraceContext
from serve_app.tracing.settings import TracingSettings
from serve_app.tracing.tracer import Tracer
from testkit.jobs.database_worlds import MODEL, World, new_batch, success
from testkit.jobs.webhook_receivers import receiving, status
from testkit.otlp_receiver import otlp_receiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = TraceContext(f"00-{TRACE_ID}-{SPAN_ID}-01", "vendor=1")


async def ended_delivery(world: World, url: str, **fields: Any) -> Delivery:
    """Submit a job, end it, and return its webhook."""
    await world.add_owner("me")
    batch = (await world.submit(new_batch(1, BatchKind.JOB, callback_url=url, **fields))).batch
    [line] = await world.lease("me", batch.id)
    await world.write(lambda connection: end_lines(connection, "me", [success(line)], world.now))
    [delivery] = await SqlOutbox(world.context, Ownership(world.context)).due_deliveries(world.now + 1, 10)
    return delivery


async def posted_headers(delivery: Delivery, code: int = 200, tracer: Tracer | None = None) -> dict[str, str]:
    """Send a webhook to a receiver that answers with a status, and return the headers that it got."""
    guard = WebhookGuard(AllowedHosts.parse("127.0.0.1"), SystemResolver())
    async with receiving(status(code)) as receiver:
        client = WebhookClient(WebhookSigner(new_secret()), guard, tracer=tracer)
        with contextlib.suppress(DeliveryFailed):
            await client.post(replace(delivery, url=f"http://127.0.0.1:{receiver.port}/"))
        await client.close()
    [request] = receiver.requests
    return request.headers


async def test_the_batch_keeps_the_context_and_its_webhook_hands_it_on(world: World) -> None:
    await world.submit(new_batch(2, trace=GIVEN))
    [waiting] = await world.database.read(lambda connection: open_batches(connection, MODEL, 10))
    assert (waiting.trace, waiting.kind) == (GIVEN, BatchKind.PROMPTS)
    delivery = await ended_delivery(world, "http://127.0.0.1:9/", trace=GIVEN)
    headers = await posted_headers(delivery)
    assert (headers["traceparent"], headers["tracestate"]) == (GIVEN.traceparent, "vendor=1")


async def test_without_a_context_a_webhook_has_none(world: World) -> None:
    delivery = await ended_delivery(world, "http://127.0.0.1:9/")
    assert delivery.trace is None
    with otlp_receiver() as receiver:
        tracer = Tracer(TracingSettings(otlp_traces_endpoint=receiver.url), "headway-jobs", "1")
        assert "traceparent" not in await posted_headers(delivery, tracer=tracer)
        await asyncio.to_thread(tracer.close)
        assert receiver.spans == []


@pytest.mark.parametrize(("code", "error_type"), [(200, None), (503, "status 503")])
async def test_an_attempt_is_a_span_whose_context_the_receiver_gets(code: int, error_type: str | None) -> None:
    delivery = Delivery("evt_1", "job_1", "t", "response.completed", "", "{}", 0, 0.0, GIVEN)
    with otlp_receiver() as receiver:
        tracer = Tracer(TracingSettings(otlp_traces_endpoint=receiver.url), "headway-jobs", "1")
        headers = await posted_headers(delivery, code, tracer)
        await asyncio.to_thread(tracer.close)
        [span] = receiver.named("webhook")
    assert (span.trace_id, span.parent_id, span.is_error) == (TRACE_ID, SPAN_ID, error_type is not None)
    assert span.attributes.get("error.type") == error_type
    assert span.attributes["headway.webhook.event"] == delivery.event
    assert headers["traceparent"] == f"00-{TRACE_ID}-{span.span_id}-01"
