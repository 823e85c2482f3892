"""Traces of a served application, received over OTLP."""

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator

import httpx
import pytest

from testkit.jobs.webhook_receivers import receiving, status
from testkit.limits import LIMIT_S, until
from testkit.otlp_receiver import OtlpReceiver, ReceivedSpan
from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from tests.ray.cluster.conftest import body
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.rotated

TOLERANCE_NS = 2_000_000


class Caller:
    """Span of a client, which samples its trace."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-01"


def root_of(traces: OtlpReceiver, caller: Caller) -> ReceivedSpan:
    """Return the server's first span of a caller's trace, once it is there."""
    return wait_for(
        lambda: next((span for span in list(traces.spans) if span.parent_id == caller.span_id), None), "a trace arrives"
    )


def leaves(traces: OtlpReceiver, span: ReceivedSpan) -> Iterator[ReceivedSpan]:
    below = traces.below(span)
    for child in below:
        assert span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns, (span.name, child.name)
        yield from leaves(traces, child)
    if not below:
        yield span


@pytest.mark.deep
def test_a_request_whose_replica_is_killed_is_one_tree_with_both(
    served: Raylets, clients: Clients, traces: OtlpReceiver
):
    caller = Caller()
    stream = clients.open(body(3000), traceparent=caller.traceparent)
    wait_for(lambda: stream.num_characters > 50, "the stream is in mid-decode")
    [pid] = [replica["pid"] for replica in served.replicas() if replica["replica_id"] == stream.replica_id]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: stream.is_over, "the stream ends")
    assert stream.is_done and stream.error is None
    root = root_of(traces, caller)
    assert (root.name, root.service) == ("POST /v1/completions", "headway-ingress")
    assert traces.root(caller.trace_id) is root, "there is one tree"
    [completion] = [span for span in traces.below(root) if span.name == f"text_completion {MODEL_NAME}"]
    assert completion.attributes["headway.num_migrations"] == 1
    lost, last = [span for span in traces.below(completion) if span.name == "placement"]
    assert lost.attributes["headway.replica_id"] == stream.replica_id != last.attributes["headway.replica_id"]
    assert (lost.is_error, last.is_error) == (True, False)
    assert [span.name for span in traces.below(lost)][-2:] == ["decode", "migrated"]
    assert {"migrated", "decode"} <= {span.name for span in traces.below(last)}
    spans = [span for span in leaves(traces, root) if span.name != "tool_parsing"]
    assert sum(span.end_ns - span.start_ns for span in spans) == pytest.approx(
        root.end_ns - root.start_ns, abs=TOLERANCE_NS
    )
    assert not any("quick brown" in str(span.attributes) for span in traces.spans)


async def test_a_job_its_line_and_its_webhook_are_one_tree(served: Raylets, traces: OtlpReceiver):
    caller = Caller()
    async with receiving(status(200)) as receiver:
        job = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 4}
        callback = {"callback_url": f"http://127.0.0.1:{receiver.port}/hook"}
        async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as http:
            headers = {"traceparent": caller.traceparent}
            answer = await http.post(f"{served.app.url}/v1/jobs", json=job | callback, headers=headers)
        assert answer.is_success, answer.text
        await until(lambda: bool(receiver.requests))
    root = await asyncio.to_thread(root_of, traces, caller)
    await until(lambda: len(traces.below(root)) == 2)
    line, webhook = traces.below(root)
    assert (line.name, line.service, webhook.name) == ("job", "headway-jobs", "webhook")
    assert [span.name for span in traces.below(line)][-1] == f"text_completion {MODEL_NAME}"
    assert receiver.requests[0].headers["traceparent"] == f"00-{caller.trace_id}-{webhook.span_id}-01"
