"""Embeddings by `vectors_client.py LIBRARY`: a text's own vector is the nearest to it among those of several texts.

`qdrant` keeps the vectors of the openai package in Qdrant's store in this process, and searches there.
"""

import sys
from collections.abc import Callable
from typing import Any

from ways import API_KEY, BASE_URL, MODEL, SCENARIO, run

TEXTS = SCENARIO["documents"]
WANTED = 1
"""Index of the text that is asked for."""


def with_openai(texts: list[str]) -> list[list[float]]:
    from openai import OpenAI

    reply = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0).embeddings.create(model=MODEL, input=texts)
    return [item.embedding for item in reply.data]


def with_langchain(texts: list[str]) -> list[list[float]]:
    from langchain_openai import OpenAIEmbeddings

    # Otherwise it sends token ids of OpenAI's tokenizer.
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=BASE_URL, api_key=API_KEY, check_embedding_ctx_length=False)
    return embeddings.embed_documents(texts)


def with_litellm(texts: list[str]) -> list[list[float]]:
    import litellm

    reply = litellm.embedding(model=f"openai/{MODEL}", input=texts, api_base=BASE_URL, api_key=API_KEY)
    return [item["embedding"] for item in reply.data]


def with_llama_index(texts: list[str]) -> list[list[float]]:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embeddings = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=API_KEY, max_retries=0)
    return embeddings.get_text_embedding_batch(texts)


def nearest(vectors: list[list[float]], wanted: list[float]) -> int:
    scores = [sum(a * b for a, b in zip(vector, wanted, strict=True)) for vector in vectors]
    return scores.index(max(scores))


def nearest_in_qdrant(vectors: list[list[float]], wanted: list[float]) -> int:
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, PointStruct, VectorParams

    store = QdrantClient(":memory:")
    store.create_collection("texts", vectors_config=VectorParams(size=len(wanted), distance=Distance.COSINE))
    store.upsert("texts", [PointStruct(id=index, vector=vector) for index, vector in enumerate(vectors)])
    return int(store.query_points("texts", query=wanted, limit=1).points[0].id)


Embed = Callable[[list[str]], list[list[float]]]
LIBRARIES: dict[str, tuple[tuple[str, ...], Embed, Any]] = {
    "openai": (("openai",), with_openai, nearest),
    "langchain": (("langchain-openai", "openai"), with_langchain, nearest),
    "litellm": (("litellm", "openai"), with_litellm, nearest),
    "llama-index": (("llama-index-embeddings-openai-like", "openai"), with_llama_index, nearest),
    "qdrant": (("qdrant-client", "openai"), with_openai, nearest_in_qdrant),
}
PACKAGES, embed, search = LIBRARIES[sys.argv[1]]


def embeddings() -> None:
    vectors, [wanted] = embed(TEXTS), embed([TEXTS[WANTED]])
    assert len(vectors) == len(TEXTS) and len(wanted) > 1, f"{len(vectors)} vectors of {len(wanted)} numbers"
    found = search(vectors, wanted)
    assert found == WANTED, f"text {found} is the nearest to text {WANTED}"


run(PACKAGES, {"embeddings": embeddings})
