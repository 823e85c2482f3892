"""Sender of spans: what it posts, and what it does when the receiver does not take it."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.trace import Span

from serve_app.tracing.settings import TracingSettings
from serve_app.tracing.span_sender import SpanSender, span_maker
from serve_app.tracing.tracer import Moment, Tracer
from testkit.limits import until
from testkit.otlp_receiver import OtlpReceiver, otlp_receiver

pytestmark = pytest.mark.rotated

BATCH_SPANS = 2048
QUEUE_SPANS = 8 * BATCH_SPANS
CLOSE_LIMIT_S = 3.0


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as server:
        yield server


def sender(receiver: OtlpReceiver) -> SpanSender:
    return SpanSender(receiver.url, span_maker(1.0, "headway-ingress", "a"))


def spans(sending: SpanSender, *names: str) -> Sequence[Span]:
    made = [sending.maker.start_span(name) for name in names]
    for span in made:
        span.end()
    return made


def put_batch(sending: SpanSender, name: str) -> None:
    """Put the spans of a request which are a batch of their own."""
    sending.put(spans(sending, *[name] * BATCH_SPANS))


def test_spans_of_many_requests_are_one_post(receiver: OtlpReceiver) -> None:
    sending = sender(receiver)
    for number in range(100):
        sending.put(spans(sending, f"{number}", "below"))
    sending.close()
    assert receiver.num_posts == 1
    assert [span.name for span in receiver.spans[::2]] == [f"{number}" for number in range(100)]
    assert {span.service for span in receiver.spans} == {"headway-ingress"}


async def test_a_receiver_that_is_busy_gets_the_batch_again(receiver: OtlpReceiver) -> None:
    receiver.status = 503
    sending = sender(receiver)
    put_batch(sending, "x")
    await until(lambda: receiver.num_posts == 1)
    receiver.status = 200
    await until(lambda: len(receiver.spans) == BATCH_SPANS)
    await asyncio.to_thread(sending.close)


async def test_a_batch_that_is_refused_is_given_up_and_the_next_one_sent(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    sending = sender(receiver)
    put_batch(sending, "x")
    await until(lambda: f"{BATCH_SPANS} spans were not received by {receiver.url}" in caplog.text)
    assert receiver.num_posts == 1 and "400" in caplog.text
    receiver.status = 200
    sending.put(spans(sending, "next"))
    await asyncio.to_thread(sending.close)
    assert [span.name for span in receiver.spans] == ["next"]


async def test_a_full_queue_takes_no_more_and_says_how_many_it_left_out(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    receiver.gate.clear()
    sending = sender(receiver)
    put_batch(sending, "first")
    await until(lambda: receiver.num_posts == 1)
    num_fitting = QUEUE_SPANS // BATCH_SPANS
    for number in range(num_fitting + 4):
        put_batch(sending, f"{number}")
    receiver.gate.set()
    await until(lambda: len(receiver.spans) == BATCH_SPANS + QUEUE_SPANS)
    await asyncio.to_thread(sending.close)
    sent = {name: len(receiver.named(name)) for name in {span.name for span in receiver.spans}}
    assert sent == dict.fromkeys(["first", *map(str, range(num_fitting))], BATCH_SPANS), "a request is sent whole"
    assert "4 requests have none" in caplog.text


@pytest.mark.parametrize("is_hanging", [True, False])
async def test_the_end_waits_for_a_bounded_time(receiver: OtlpReceiver, is_hanging: bool) -> None:
    """A receiver neither answers nor takes anything; another one is busy, so that a repetition is due later."""
    receiver.status = 503
    sending = sender(receiver)
    if is_hanging:
        receiver.gate.clear()
    sending.put(spans(sending, "a"))
    start_s = time.monotonic()
    await asyncio.to_thread(sending.close)
    assert time.monotonic() - start_s < CLOSE_LIMIT_S + 1.0
    assert receiver.num_posts > 0 and not receiver.spans


def test_the_variables_of_opentelemetry_apply(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret,tenant=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    sending = sender(receiver)
    sending.put(spans(sending, "a"))
    sending.close()
    [headers] = receiver.headers
    assert (headers["authorization"], headers["tenant"]) == ("Bearer secret", "a")
    assert headers["content-encoding"] == "gzip"
    assert [span.name for span in receiver.spans] == ["a"]


def test_the_users_credentials_are_not_sent(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login user password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    sending = sender(receiver)
    sending.put(spans(sending, "a"))
    sending.close()
    [headers] = receiver.headers
    assert "authorization" not in headers


def test_with_opentelemetry_disabled_nothing_is_traced(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = Tracer(TracingSettings(receiver.url), "headway-ingress", "a")
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert tracer.begin("GET", {}, Moment(0.0, 0.0)) is None
    below = tracer.begin("GET", {"traceparent": traceparent}, Moment(0.0, 0.0))
    assert below is not None and not below.is_recorded and below.context.traceparent == traceparent
    tracer.close()


def test_the_global_provider_is_left_alone(receiver: OtlpReceiver) -> None:
    before = trace.get_tracer_provider()
    sender(receiver).close()
    assert trace.get_tracer_provider() is before


def test_the_exporter_is_imported_only_for_an_endpoint() -> None:
    program = (
        "import sys; from serve_app.tracing.tracer import Tracer; from serve_app.tracing.settings import "
        "TracingSettings; import serve_app.tracing.request_spans; Tracer(TracingSettings(), 'a', 'b'); "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.exporter', 'opentelemetry.sdk'))])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
