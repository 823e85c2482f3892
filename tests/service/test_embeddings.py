"""Embeddings and scores over HTTP: a real engine, tiny checkpoints, and transformers' own model beside them."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testkit.model.pooling_checkpoints import (
    PoolingFiles,
    expected_vectors,
    write_embedder,
    write_encoder,
    write_yes_no_reranker,
)
from tests.service.conftest import Service, serving

pytestmark = pytest.mark.rotated

FILES = PoolingFiles("lasttoken", prompts={"query": "find the fox: ", "passage": ""}, max_tokens=100)
TEXTS = ["the quick brown fox", "a", "jumps over the lazy dog, and then some more of it", "the quick brown fox jumps"]
SIZES = (16, 32)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_embedder(tmp_path_factory.mktemp("embedder"), "qwen3", FILES, matryoshka_dimensions=list(SIZES))


@pytest.fixture
async def service(embedder: Path) -> AsyncIterator[Service]:
    async with serving(embedder) as served:
        yield served


def ids_of(path: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    return ids


def expected(path: Path, texts: list[str]) -> torch.Tensor:
    return expected_vectors(path, [ids_of(path, text) for text in texts], FILES)


def check(vectors: list[list[float]], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(vectors, dtype=torch.float32), wanted, atol=1e-5, rtol=0)


async def test_embeddings_come_as_numbers_or_base64_of_texts_or_ids_beside_chats(
    service: Service, embedder: Path
) -> None:
    wanted = expected(embedder, TEXTS)
    chat = asyncio.create_task(
        service.openai.completions.create(model="tiny", prompt="the quick", max_tokens=30, temperature=0)
    )
    reply = await service.openai.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    check([item.embedding for item in reply.data], wanted)
    num_tokens = sum(len(ids_of(embedder, text)) for text in TEXTS)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
    assert [item.index for item in reply.data] == [0, 1, 2, 3] and reply.model == "tiny"
    by_default = await service.openai.embeddings.create(model="tiny", input=TEXTS[2])  # It asks for base64.
    check([by_default.data[0].embedding], wanted[2:3])
    raw = await service.http.post("/v1/embeddings", json={"model": "tiny", "input": "a", "encoding_format": "base64"})
    numbers = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), "<f4")
    check([numbers.tolist()], wanted[1:2])
    ids = [ids_of(embedder, text) for text in TEXTS]
    check([item.embedding for item in (await service.openai.embeddings.create(model="tiny", input=ids)).data], wanted)
    assert len((await chat).choices[0].text) > 0


async def test_prompts_and_dimensions_are_those_of_the_checkpoint(service: Service, embedder: Path) -> None:
    async def vector(**fields: object) -> list[float]:
        reply = await service.http.post("/v1/embeddings", json={"model": "tiny", "input": "the dog", **fields})
        assert reply.status_code == 200, reply.text
        numbers: list[float] = reply.json()["data"][0]["embedding"]
        return numbers

    plain, prompted = expected(embedder, ["the dog", "find the fox: the dog"])
    check([await vector(prompt_name="query"), await vector(input_type="query")], torch.stack([prompted] * 2))
    check([await vector(input_type="document"), await vector(dimensions=64)], torch.stack([plain] * 2))
    check([await vector(dimensions=16)], torch.nn.functional.normalize(plain[None, :16], dim=-1))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"dimensions": 17}, "dimensions", "one of 16, 32"),
        ({"dimensions": 65}, "dimensions", "at most 64"),
        ({"prompt_name": "passages"}, "prompt_name", "query, passage"),
        ({"prompt_name": "query", "input": [3, 4]}, "prompt_name", "token ids"),
        ({"prompt_name": "query", "input_type": "query"}, "input_type", "one of them"),
        ({"input": []}, "input", "not empty"),
        ({"input": "dog " * 200}, "input", "100 tokens"),
        ({"input": [[5] * 101]}, "input", "100 tokens"),
        ({"input": [10**6]}, "input", "1000000"),
        ({"input": "a", "truncate_prompt_tokens": 101}, "truncate_prompt_tokens", "at most 100"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"encoding_format": "int8"}, "encoding_format", "float, base64"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    service: Service, fields: dict[str, object], param: str, words: str
) -> None:
    reply = await service.http.post("/v1/embeddings", json={"model": "tiny", "input": "a", **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], error


async def test_a_long_text_is_cut_within_its_special_tokens(service: Service, embedder: Path) -> None:
    text = " ".join(f"dog {number} of the lazy fox" for number in range(5000))
    whole = ids_of(embedder, text)
    for side, kept in (("right", whole[:29]), ("left", whole[-30:-1])):
        reply = await service.http.post(
            "/v1/embeddings",
            json={"model": "tiny", "input": text, "truncate_prompt_tokens": 30, "truncation_side": side},
        )
        assert reply.json()["usage"]["prompt_tokens"] == 30, reply.text
        check([reply.json()["data"][0]["embedding"]], expected_vectors(embedder, [[*kept, whole[-1]]], FILES))


async def test_more_texts_than_the_engine_takes_at_once_are_embedded(service: Service, embedder: Path) -> None:
    texts = [f"{number} dogs" for number in range(600)]
    reply = await service.openai.embeddings.create(model="tiny", input=texts)
    check([item.embedding for item in reply.data][::97], expected(embedder, texts[::97]))


async def test_a_model_says_what_it_cannot_do(checkpoint: Path) -> None:
    async with serving(checkpoint) as service:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            reply = await service.http.post(path, json={"model": "tiny", **body})
            assert reply.status_code == 400 and "no pooling" in reply.json()["error"]["message"]


async def test_an_encoder_embeds_and_generates_nothing(tmp_path: Path) -> None:
    files = PoolingFiles("mean")
    path = write_encoder(tmp_path, "bert", files)
    async with serving(path) as service:
        reply = await service.openai.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        check(
            [item.embedding for item in reply.data],
            expected_vectors(path, [ids_of(path, text) for text in TEXTS], files),
        )
        too_long = await service.http.post("/v1/embeddings", json={"model": "tiny", "input": [[5] * 65]})
        assert too_long.status_code == 400 and "64 tokens" in too_long.json()["error"]["message"]
        refused = await service.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert refused.status_code == 400 and "generates none" in refused.json()["error"]["message"]


async def test_scores_and_ranks_are_those_of_the_tokens_logits(tmp_path: Path) -> None:
    path = write_yes_no_reranker(tmp_path, "qwen3", 40, 41)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    query, documents = "the fox", ["a lazy dog", "the quick brown fox", "more of it"]
    scores = []
    for document in documents:
        ids = tokenizer(f"q: {query}\nd: {document}\nanswer:")["input_ids"]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        scores.append(torch.sigmoid(logits[40] - logits[41]).item())
    async with serving(path) as service:
        body = {"model": "tiny", "text_1": query, "text_2": documents}
        for route in ("/v1/score", "/score"):
            reply = (await service.http.post(route, json=body)).json()
            assert [item["score"] for item in reply["data"]] == pytest.approx(scores, abs=1e-5)
        best = sorted(range(3), key=lambda index: -scores[index])
        for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
            ranked = {
                "model": "tiny",
                "query": query,
                "documents": [*documents[:2], {"text": documents[2]}],
                "top_n": 2,
            }
            results = (await service.http.post(route, json=ranked)).json()["results"]
            assert [item["index"] for item in results] == best[:2]
            assert [item["relevance_score"] for item in results] == pytest.approx(
                [scores[i] for i in best[:2]], abs=1e-5
            )
            assert [item["document"]["text"] for item in results] == [documents[index] for index in best[:2]]
        refused = await service.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        assert refused.status_code == 400 and "scores, and no embeddings" in refused.json()["error"]["message"]
        many = await service.http.post("/v1/score", json={"model": "tiny", "text_1": ["a", "b"], "text_2": documents})
        assert many.status_code == 400 and many.json()["error"]["param"] == "text_1"


async def test_a_batch_embeds_its_lines_and_a_job_its_texts(embedder: Path, tmp_path: Path) -> None:
    wanted = expected(embedder, TEXTS)
    async with serving(embedder, data_dir=tmp_path) as service:
        lines = [
            {
                "custom_id": str(index),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": "tiny", "input": text, "encoding_format": "float"},
            }
            for index, text in enumerate(TEXTS)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = await service.openai.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await service.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.1)
            batch = await service.openai.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        output = await service.openai.files.content(batch.output_file_id)
        replies = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.text.splitlines())}
        check([replies[str(index)]["data"][0]["embedding"] for index in range(len(TEXTS))], wanted)
        job = (await service.http.post("/v1/jobs", json={"model": "tiny", "input": TEXTS})).json()
        ended = (await service.http.get(f"/v1/jobs/{job['id']}", params={"wait": 60})).json()
        check([item["embedding"] for item in ended["result"]["data"]], wanted)
