"""Traces of requests, from their headers to an OTLP receiver."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from replicas.errors import ServingError
from serve_app.tracing.context import TraceContext
from serve_app.tracing.settings import TracingSettings
from serve_app.tracing.tracer import Moment, Tracer
from testkit.http.api import MODEL, MakeApi, card_of
from testkit.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
SERVER, CLIENT = 2, 3


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as server:
        yield server


def tracer(receiver: OtlpReceiver, **settings: object) -> Tracer:
    return Tracer(TracingSettings(otlp_traces_endpoint=receiver.url, **settings), "headway-ingress", "a")  # type: ignore[arg-type]


def nested(receiver: OtlpReceiver, span: ReceivedSpan) -> None:
    """Check that the spans below one lie within it, one after the other where they do not run side by side."""
    for child in receiver.below(span):
        assert span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns, (span.name, child.name)
        nested(receiver, child)


def messages(text: str = "hello") -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


async def close(traced: Tracer) -> None:
    await asyncio.to_thread(traced.close)


async def test_a_chat_is_one_tree_below_the_callers_span(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver, trace_sampling_ratio=0.0)
    api = make_api(tracer=traced, ttft_s=0.05, tpot_s=0.02, cached_tokens=3)
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
    answer = await api.post("/v1/chat/completions", messages("secret") | {"temperature": 0.5}, **headers)
    await close(traced)
    [root] = [span for span in receiver.spans if span.parent_id == PARENT_ID]
    assert (root.trace_id, root.kind, root.is_error) == (TRACE_ID, SERVER, False)
    assert root.name == "POST /v1/chat/completions" and root.attributes["http.response.status_code"] == 200
    names = [span.name for span in receiver.below(root)]
    assert [name for name in names if name != "received"] == ["tokenizing", f"chat {MODEL}"]
    nested(receiver, root)
    [chat] = receiver.named(f"chat {MODEL}")
    usage = answer.json()["usage"]
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }
    assert chat.kind == CLIENT and {name: chat.attributes.get(name) for name in wanted} == wanted
    [placement] = [span for span in receiver.below(chat) if span.name == "placement"]
    assert placement.attributes["headway.replica_id"] == "replica-a"
    phases = {span.name: (span.end_ns - span.start_ns) / 1e9 for span in receiver.below(placement)}
    assert phases["prefill"] >= 0.05 and phases["decode"] >= 0.06
    lengths_ns = [span.end_ns - span.start_ns for span in receiver.spans if not receiver.below(span)]
    assert sum(lengths_ns) == pytest.approx(root.end_ns - root.start_ns, abs=2_000_000)
    assert "secret" not in json.dumps([span.attributes for span in receiver.spans])


@pytest.mark.parametrize(("traceparent", "is_sent"), [(SAMPLED, True), (NOT_SAMPLED, False), ("nonsense", True)])
async def test_the_caller_decides_what_is_sampled(
    make_api: MakeApi, receiver: OtlpReceiver, traceparent: str, is_sent: bool
) -> None:
    traced = tracer(receiver, trace_sampling_ratio=1.0)
    api = make_api(tracer=traced)
    assert (await api.post("/v1/chat/completions", messages(), traceparent=traceparent)).status_code == 200
    await close(traced)
    assert bool(receiver.spans) == is_sent
    assert {span.trace_id for span in receiver.spans} == ({TRACE_ID} if traceparent == SAMPLED else ids(receiver))


def ids(receiver: OtlpReceiver) -> set[str]:
    return {span.trace_id for span in receiver.spans}


async def test_a_ratio_samples_whole_requests(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver, trace_sampling_ratio=0.3)
    api = make_api(tracer=traced)
    await asyncio.gather(*(api.complete(max_tokens=1) for _ in range(60)))
    await close(traced)
    assert 3 <= len(ids(receiver)) <= 40
    for trace_id in ids(receiver):
        nested(receiver, receiver.root(trace_id))


async def test_one_of_many_pieces_of_work_has_a_trace_of_its_own_with_a_link(receiver: OtlpReceiver) -> None:
    traced = tracer(receiver)
    for cause in (TraceContext(SAMPLED), None):
        line = traced.begin_linked_work("batch line", cause, Moment(1000.0, 1.0))
        assert line is not None
        line.end(3.5, {"headway.batch_id": "batch_1"})
    await close(traced)
    linked, free = receiver.named("batch line")
    assert (linked.links, free.links) == ((TRACE_ID,), ())
    assert linked.parent_id == "" and linked.trace_id not in (TRACE_ID, free.trace_id)
    assert (linked.start_ns, linked.end_ns) == (1000 * 10**9, 1002_500_000_000)


async def test_probes_are_not_traced_and_other_routes_are(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver)
    api = make_api(tracer=traced)
    for path in ("/health", "/metrics", "/load", "/v1/models", "/v1/files/unknown", "/nowhere"):
        await api.http.get(path)
    await close(traced)
    assert [span.name for span in receiver.spans] == ["GET /v1/models", "GET /v1/files/{file_id}", "GET"]
    assert not any(span.is_error for span in receiver.spans), "a 404 is the client's mistake"


async def test_a_failed_request_and_a_refused_one(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver)
    api = make_api(tracer=traced, fail_at=2, error=ServingError("scripted"))
    assert (await api.chat(max_tokens=4)).status_code == 500
    assert (await api.chat(max_tokens=4, temperature=9)).status_code == 400
    await close(traced)
    failed, refused = receiver.named("POST /v1/chat/completions")
    assert failed.is_error and failed.attributes["error.type"] == failed.attributes["headway.error_code"]
    assert any(span.name == "placement" for span in receiver.spans if span.trace_id == failed.trace_id)
    assert not refused.is_error and refused.attributes["http.response.status_code"] == 400
    assert receiver.below(refused) == []


async def test_several_sequences_have_a_branch_each(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver)
    api = make_api(tracer=traced)
    await api.chat(max_tokens=2, n=3)
    await close(traced)
    sequences = receiver.named("sequence")
    assert sorted(span.attributes["headway.sequence.index"] for span in sequences) == [0, 1, 2]
    assert all("placement" in [child.name for child in receiver.below(span)] for span in sequences)
    [chat] = receiver.named(f"chat {MODEL}")
    assert chat.attributes["gen_ai.request.choice.count"] == 3


async def test_a_request_has_a_bounded_number_of_spans(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver)
    api = make_api(tracer=traced)
    assert (await api.complete(max_tokens=2, n=100)).status_code == 200
    await close(traced)
    assert len(receiver.named("sequence")) == 16
    assert len(receiver.spans) <= 257


async def test_prompts_are_in_spans_only_if_asked_for(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    traced = tracer(receiver, trace_prompts=True)
    api = make_api(tracer=traced)
    await api.post("/v1/chat/completions", messages("secret"))
    await api.complete(max_tokens=1, prompt="x" * 300_000, truncate_prompt_tokens=4)
    await close(traced)
    [chat] = receiver.named(f"chat {MODEL}")
    assert json.loads(chat.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "secret"}]}
    ]
    [text] = receiver.named(f"text_completion {MODEL}")
    assert text.attributes["headway.prompt_bytes"] > 300_000 and "gen_ai.input.messages" not in text.attributes


async def test_tool_parsing_has_a_span(
    make_api: MakeApi, receiver: OtlpReceiver, tokenizer: PreTrainedTokenizerFast
) -> None:
    traced = tracer(receiver)
    card = card_of(tokenizer, max_model_len=2048)
    api = make_api(tracer=traced, settings={"tool_call_parser": "hermes"}, dispatcher={"card": card})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for stream in (False, True):
        answer = await api.post("/v1/chat/completions", messages() | {"tools": tools, "stream": stream})
        assert answer.status_code == 200, answer.text
    await close(traced)
    assert len(receiver.named("tool_parsing")) == 2
    for span in receiver.named("tool_parsing"):
        assert 0.0 < span.attributes["headway.tool_parsing.busy_s"] <= (span.end_ns - span.start_ns) / 1e9 + 1e-6
        nested(receiver, receiver.root(span.trace_id))


async def test_the_access_line_names_the_trace(
    make_api: MakeApi, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    traced = tracer(receiver)
    await make_api(tracer=traced).post("/v1/chat/completions", messages(), traceparent=SAMPLED)
    await make_api().post("/v1/chat/completions", messages(), traceparent=SAMPLED)
    await close(traced)
    lines = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert [getattr(line, "trace_id", None) for line in lines] == [TRACE_ID, None]


async def test_a_receiver_that_fails_disturbs_no_request(make_api: MakeApi, receiver: OtlpReceiver) -> None:
    receiver.status = 400
    traced = tracer(receiver)
    api = make_api(tracer=traced)
    answers = await asyncio.gather(*(api.complete(max_tokens=2) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    await close(traced)
    assert receiver.num_posts > 0 and not receiver.spans


async def test_a_receiver_that_hangs_delays_neither_requests_nor_the_end(
    make_api: MakeApi, receiver: OtlpReceiver
) -> None:
    receiver.gate.clear()
    traced = tracer(receiver)
    api = make_api(tracer=traced)
    answers = await asyncio.gather(*(api.complete(max_tokens=2) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    await close(traced)
    assert not receiver.gate.is_set() and not receiver.spans


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector/otlp/x?key=1", "http://collector/otlp/x?key=1"),
        (None, None),
    ],
)
def test_the_path_of_an_endpoint_may_be_left_out(given: str | None, url: str | None) -> None:
    assert TracingSettings(otlp_traces_endpoint=given).url == url


@pytest.mark.parametrize("bad", ["collector:4317", "grpc://collector", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint"):
        TracingSettings(otlp_traces_endpoint=bad)
