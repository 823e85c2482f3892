"""Files, batches and jobs on the real engine, through the stock client and the command line."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anyio.from_thread import start_blocking_portal

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.serving.batch_calls import MODEL_NAME, chat_body, ended, line, look, results, submit
from testkit.serving.served import ROOT, wait_for

pytestmark = pytest.mark.rotated

LONG = 30_000
"""Output tokens of a request that no test waits for: many seconds."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve with the keys of two tenants; yield the base URL."""
    folder = tmp_path_factory.mktemp("service")
    model = str(write_checkpoint(folder / MODEL_NAME, max_position_embeddings=32768))
    options = ReplicaOptions(
        ModelOptions(model, dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=64 * 2**20),
        EngineLimits(max_num_seqs=4),
        StreamOptions(),
    )
    settings = IngressSettings(
        model=model, served_model_name=MODEL_NAME, api_key_file=write_keys(folder, "acme", "zeta")
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(local_service(options, settings, folder)) as service,
    ):
        yield service.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="acme", max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": "Bearer acme"}, timeout=LIMIT_S) as http:
        yield http


def test_request_that_cannot_be_served_fails_alone(client: openai.OpenAI) -> None:
    bad = line("long", text="word " * 40_000), line("hot", temperature="very")
    batch = ended(client, submit(client, line("good"), *bad, line("fine")))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    assert results(client, batch.output_file_id).keys() == {"good", "fine"}
    failed = {id_: found["response"] for id_, found in results(client, batch.error_file_id).items()}
    assert {id_: response["status_code"] for id_, response in failed.items()} == {"long": 400, "hot": 400}
    assert failed["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert failed["hot"]["body"]["error"]["param"] == "temperature"


def test_lines_of_responses_are_answered_as_responses(client: openai.OpenAI, http: httpx.Client) -> None:
    endpoint = "/v1/responses"

    def of_response(name: str, **fields: Any) -> str:
        body = {"model": MODEL_NAME, "input": "hi", "max_output_tokens": 8, **fields}
        return json.dumps({"custom_id": name, "method": "POST", "url": endpoint, "body": body})

    tools = [{"type": "web_search"}]
    bad = of_response("bad", previous_response_id="resp_1"), of_response("early", background=True)
    lines = of_response("good", tools=tools, colour="red"), of_response("alone", store=False), *bad
    batch = ended(client, submit(client, *lines, endpoint=endpoint))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    bodies = {name: one["response"]["body"] for name, one in results(client, batch.output_file_id).items()}
    response = bodies["good"]
    assert (response["object"], response["usage"]["output_tokens"] > 0) == ("response", True)
    assert response["warnings"] == ["ignored: colour", "ignored tool: web_search"]
    failed = {name: one["response"] for name, one in results(client, batch.error_file_id).items()}
    outcomes = {name: (one["status_code"], one["body"]["error"]["param"]) for name, one in failed.items()}
    assert outcomes == {"bad": (404, "previous_response_id"), "early": (400, "background")}
    # A stored response of a line is read and continued as any other.
    assert http.get(f"/v1/responses/{response['id']}").json() == response
    assert http.get(f"/v1/responses/{bodies['alone']['id']}").status_code == 404
    assert http.get(f"/v1/responses/{response['id']}", headers={"authorization": "Bearer zeta"}).status_code == 404
    conversation = http.post("/v1/conversations", json={}).json()["id"]
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    lines = (
        of_response("next", previous_response_id=response["id"], input="again"),
        of_response("talk", conversation=conversation),
        of_response("refer", input=[*references, {"role": "user", "content": "again"}]),
        of_response("lost", input=[{"type": "item_reference", "id": "msg_none"}]),
    )
    batch = ended(client, submit(client, *lines, endpoint=endpoint))
    [(name, lost)] = results(client, batch.error_file_id).items()
    assert (name, lost["response"]["body"]["error"]["code"]) == ("lost", "item_not_found")
    bodies = {name: one["response"]["body"] for name, one in results(client, batch.output_file_id).items()}
    talked = http.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"}).json()["data"]
    assert talked[1:] == bodies["talk"]["output"] and talked[0]["content"][0]["text"] == "hi"
    referring = http.get(f"/v1/responses/{bodies['refer']['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert referring[:-1] == response["output"]
    response = bodies["next"]
    asked = {"model": MODEL_NAME, "input": "and again", "previous_response_id": response["id"]}
    num_tokens = http.post("/v1/responses/input_tokens", json=asked).json()["input_tokens"]
    assert num_tokens > response["usage"]["input_tokens"] + response["usage"]["output_tokens"]


def test_a_line_with_ignored_fields_is_served_and_names_them(client: openai.OpenAI) -> None:
    message = {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}
    batch = ended(client, submit(client, line("a", messages=[message], colour="red"), "\ufeff" + line("b")))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    answers = {name: found["response"]["body"] for name, found in results(client, batch.output_file_id).items()}
    assert answers["a"]["warnings"] == ["ignored: messages.0.cache_control", "ignored: colour"]
    assert "warnings" not in answers["b"]


def test_lines_of_messages_are_answered_as_messages(client: openai.OpenAI) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    endpoint = "/v1/messages"
    good = line("good", endpoint=endpoint, system="be brief", tools=tools)
    batch = ended(client, submit(client, good, line("bad", endpoint=endpoint, max_tokens=0), endpoint=endpoint))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    message = results(client, batch.output_file_id)["good"]["response"]["body"]
    assert (message["type"], message["stop_reason"], message["usage"]["output_tokens"]) == ("message", "max_tokens", 8)
    assert message["warnings"] == ["ignored: ignore_eos", "ignored tool: web_search_20250305"]
    failed = results(client, batch.error_file_id)["bad"]["response"]
    assert (failed["status_code"], failed["body"]["type"]) == (400, "error")
    assert failed["body"]["error"]["type"] == "invalid_request_error"


def test_a_message_batch_has_a_result_for_each_request(http: httpx.Client) -> None:
    params = {"model": MODEL_NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    bodies = {"good": params, "zero": params | {"max_tokens": 0}, "other": params | {"model": "nobody"}}
    requests = [{"custom_id": name, "params": body} for name, body in bodies.items()]
    path = f"/v1/messages/batches/{http.post('/v1/messages/batches', json={'requests': requests}).json()['id']}"
    batch = wait_for(lambda: (found := http.get(path).json())["ended_at"] and found, f"{path} has ended", period_s=0.2)
    assert batch["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 0, "expired": 0}
    lines = [json.loads(text) for text in http.get(batch["results_url"]).text.splitlines()]
    assert [one["custom_id"] for one in lines] == list(bodies)
    good, zero, other = (one["result"] for one in lines)
    assert (good["type"], good["message"]["type"], good["message"]["usage"]["output_tokens"]) == (
        "succeeded", "message", 4,
    )  # fmt: skip
    kinds = [(one["type"], one["error"]["type"], one["error"]["error"]["type"]) for one in (zero, other)]
    assert kinds == [("errored", "error", "invalid_request_error"), ("errored", "error", "not_found_error")]
    assert http.delete(path).json()["type"] == "message_batch_deleted"
    assert http.get(path).status_code == http.get(f"{path}/results").status_code == 404


@pytest.mark.parametrize(
    ("lines", "number", "code"),
    [
        ((line("a"), "{no json"), 2, "invalid_json_line"),
        ((line("a"), line("b"), line("a")), 3, "duplicate_custom_id"),
        ((line("a"), line("b").replace("/v1/chat/completions", "/v1/completions")), 2, "mismatched_url"),
    ],
)
def test_malformed_file_fails_as_a_whole_and_says_where(
    client: openai.OpenAI, lines: tuple[str, ...], number: int, code: str
) -> None:
    batch = ended(client, submit(client, *lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [(number, code)]


def test_cancelled_batch_keeps_what_was_done(client: openai.OpenAI) -> None:
    batch = submit(client, line("short"), *(line(f"long-{i}", max_tokens=LONG) for i in range(2)))
    wait_for(lambda: look(client, batch).request_counts.completed == 1, "the short one is done", period_s=0.1)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    done, undone = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert "short" in done
    assert done.keys() | undone.keys() == {"short", *(f"long-{i}" for i in range(2))}
    assert not done.keys() & undone.keys()
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.code == "batch_not_cancellable"


def test_window_that_ends_keeps_what_was_done(client: openai.OpenAI) -> None:
    batch = submit(client, line("short"), *(line(f"long-{i}", max_tokens=LONG) for i in range(2)), window="8s")
    batch = ended(client, batch)
    assert (batch.status, batch.expires_at - batch.created_at) == ("expired", 8)
    done, undone = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert done.keys() == {"short"}
    assert undone.keys() == {f"long-{i}" for i in range(2)}
    assert {found["error"]["code"] for found in undone.values()} == {"batch_expired"}


def test_file_in_use_stays_and_is_deleted_afterwards(client: openai.OpenAI) -> None:
    batch = submit(client, line("a", max_tokens=LONG))
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.input_file_id)


def test_another_tenants_ids_are_unknown(client: openai.OpenAI, http: httpx.Client) -> None:
    batch = ended(client, submit(client, line("a")))
    job_id = http.post("/v1/jobs", json=chat_body()).json()["id"]
    other = client.with_options(api_key="zeta")
    asks = [
        (other.files.retrieve, batch.input_file_id),
        (other.files.content, batch.output_file_id),
        (other.files.delete, batch.input_file_id),
        (other.batches.retrieve, batch.id),
        (other.batches.cancel, batch.id),
    ]
    for ask, id_ in asks:
        with pytest.raises(openai.NotFoundError):
            ask(id_)
    assert not list(other.batches.list()) and not list(other.files.list())
    assert http.get(f"/v1/jobs/{job_id}", headers={"authorization": "Bearer zeta"}).status_code == 404
    assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["status"] == "completed"


def test_job_result_equals_the_endpoints_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    accepted = http.post("/v1/jobs", json=chat_body("a job", priority=1))
    assert (accepted.status_code, accepted.json()["status"]) == (202, "queued")
    job = http.get(f"{accepted.headers['location']}?wait=60").json()
    assert (job["status"], job["error"], job["priority"]) == ("completed", None, 1)
    direct = http.post("/v1/chat/completions", json=chat_body("a job")).json()
    assert job["result"]["choices"][0]["message"] == direct["choices"][0]["message"]
    late = http.post("/v1/jobs", json=chat_body(max_tokens=LONG, deadline_ms=1000)).json()
    late = http.get(f"/v1/jobs/{late['id']}?wait=60").json()
    assert (late["status"], late["result"]) == ("expired", None)
    gone = http.post("/v1/jobs", json=chat_body(max_tokens=LONG)).json()
    assert http.delete(f"/v1/jobs/{gone['id']}").status_code == 200
    assert http.get(f"/v1/jobs/{gone['id']}?wait=60").json()["status"] == "cancelled"


def test_job_with_a_used_key_is_the_same_or_409(http: httpx.Client) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    first = http.post("/v1/jobs", json=chat_body(), headers=key).json()
    again = http.post("/v1/jobs", json=chat_body(), headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])
    refused = http.post("/v1/jobs", json=chat_body("other"), headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    theirs = http.post("/v1/jobs", json=chat_body(), headers=key | {"authorization": "Bearer zeta"})
    assert (theirs.status_code, theirs.json()["id"] != first["id"]) == (202, True)


def test_short_form_is_polled_to_its_result(http: httpx.Client) -> None:
    job_id = http.post("/generate", json={"prompt": "the quick"}).json()["job_id"]
    found = http.get(f"/status/{job_id}?wait=60").json()
    assert (found["job_id"], found["status"]) == (job_id, "completed")
    assert found["result"]["usage"]["completion_tokens"] <= 50


def test_prompt_batches_answer_at_once_or_later(http: httpx.Client) -> None:
    body = {"prompts": ["the quick", "", "brown fox"], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/batch/sync", json=body).json()
    assert [output["status"] for output in whole["outputs"]] == ["completed", "failed", "completed"]
    batch_id = http.post("/v1/batch/async", json=body).json()["batch_id"]

    def done() -> Any:
        batch = http.get(f"/v1/batch/{batch_id}").json()
        return batch if batch["status"] == "completed" else None

    batch = wait_for(done, "the prompts are done", period_s=0.1)
    assert (batch["progress"], batch["request_counts"]) == (1.0, {"total": 3, "completed": 2, "failed": 1})
    texts = [output["text"] for output in batch["outputs"]]
    assert texts == [output["text"] for output in whole["outputs"]]
    assert http.get("/v1/batch/stats").json()["total_batches"] >= 1
    lines = http.post("/v1/batch/sync?stream=true", json=body).text.splitlines()
    pieces = [json.loads(text) for text in lines]
    assert "".join(piece.get("text") or "" for piece in pieces if piece.get("index") == 0) == texts[0]
    assert (pieces[-1]["status"], pieces[-1]["num_completed"]) == ("completed", 2)


def test_command_submits_waits_and_saves(url: str, tmp_path: Path) -> None:
    requests, output = tmp_path / "requests.jsonl", tmp_path / "output.jsonl"
    requests.write_text("\n".join(line(f"r-{number}") for number in range(5)))

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "serve_app.cli.main", "batch", *arguments, "--url", url, "--api-key", "acme"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    finished = run("submit", requests, "--wait", "--output", output, "--poll-every", "0.2")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("batch_")
    assert len(output.read_text().splitlines()) == 5
    status = run("status", finished.stdout.strip())
    assert "5 completed, 0 failed, of 5" in status.stdout
