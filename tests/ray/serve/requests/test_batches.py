"""Files and batches through Serve: what needs its proxy, its handles and the jobs deployment's process."""

import time

import httpx
import openai

from testkit.serving.batch_calls import chat_body, ended, line, results, submit


def test_batch_answers_what_the_endpoint_answers(client: openai.OpenAI, http: httpx.Client) -> None:
    texts = {f"r-{number}": f"number {number}" for number in range(20)}
    batch = submit(client, *(line(id_, text=text) for id_, text in texts.items()), metadata={"night": "1"})
    assert batch.status == "validating"
    batch = ended(client, batch)
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"night": "1"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    found = results(client, batch.output_file_id)
    assert found.keys() == texts.keys()
    for id_ in ("r-0", "r-19"):
        response = found[id_]["response"]
        assert (response["status_code"], found[id_]["error"]) == (200, None)
        direct = http.post("/v1/chat/completions", json=chat_body(texts[id_])).json()
        assert response["body"]["choices"][0]["message"] == direct["choices"][0]["message"]
        assert response["body"]["usage"]["completion_tokens"] == 8
    assert batch.usage.output_tokens == 20 * 8
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == ("batch_output", len(client.files.content(output.id).content))
    assert batch.id in [listed.id for listed in client.batches.list(limit=2)]


def test_large_file_goes_up_and_comes_down(client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 2**16
    file = client.files.create(file=("large.bin", content), purpose="user_data")
    assert file.bytes == len(content)
    with client.files.with_streaming_response.content(file.id) as response:
        parts = response.iter_bytes()
        received = [next(parts)]
        time.sleep(1)  # all other parts wait in the ingress
        received += parts
    assert b"".join(received) == content
