"""Sender of spans: what it posts, and what it does when the receiver does not take it."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from serve_app.tracing.span_sender import SpanSender
from testkit.limits import until
from testkit.otlp_receiver import OtlpReceiver, otlp_receiver

BATCH_BYTES = 2**20
QUEUE_BYTES = 16 * BATCH_BYTES


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as server:
        yield server


def spans(*names: str) -> bytes:
    encoded: bytes = ScopeSpans(spans=[Span(name=name) for name in names]).SerializeToString()
    return encoded


def sender(receiver: OtlpReceiver) -> SpanSender:
    return SpanSender(receiver.url, "headway-ingress", "a")


def test_spans_of_many_requests_are_one_post(receiver: OtlpReceiver) -> None:
    sending = sender(receiver)
    for number in range(100):
        sending.put(spans(f"{number}", "below"))
    sending.close()
    assert receiver.num_posts == 1
    assert [span.name for span in receiver.spans[::2]] == [f"{number}" for number in range(100)]
    assert {span.service for span in receiver.spans} == {"headway-ingress"}


async def test_a_receiver_that_is_busy_gets_the_batch_again(receiver: OtlpReceiver) -> None:
    receiver.status = 503
    sending = sender(receiver)
    sending.put(spans("x" * BATCH_BYTES))
    await until(lambda: receiver.num_posts == 1)
    receiver.status = 200
    await until(lambda: len(receiver.spans) == 1)
    await asyncio.to_thread(sending.close)


async def test_a_batch_that_is_refused_is_given_up_and_the_next_one_sent(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    sending = sender(receiver)
    sending.put(spans("x" * BATCH_BYTES))
    await until(lambda: bool(caplog.records))
    assert receiver.num_posts == 1 and "400" in caplog.text
    receiver.status = 200
    sending.put(spans("next"))
    await asyncio.to_thread(sending.close)
    assert [span.name for span in receiver.spans] == ["next"]


async def test_a_full_queue_takes_no_more_and_says_how_many_it_left_out(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    receiver.gate.clear()
    sending = sender(receiver)
    sending.put(spans("y" * BATCH_BYTES))
    await until(lambda: receiver.num_posts == 1)
    for _ in range(QUEUE_BYTES // BATCH_BYTES + 4):
        sending.put(spans("y" * BATCH_BYTES))
    receiver.gate.set()
    await asyncio.to_thread(sending.close)
    num_sent = len(receiver.spans)
    assert num_sent == QUEUE_BYTES // BATCH_BYTES
    assert f"{QUEUE_BYTES // BATCH_BYTES + 5 - num_sent} requests have none" in caplog.text


def test_the_variables_of_opentelemetry_apply(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret,tenant=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    sending = sender(receiver)
    sending.put(spans("a"))
    sending.close()
    [headers] = receiver.headers
    assert (headers["authorization"], headers["tenant"]) == ("Bearer secret", "a")
    assert headers["content-encoding"] == "gzip"
    assert [span.name for span in receiver.spans] == ["a"]
