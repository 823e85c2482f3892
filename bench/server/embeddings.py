"""Texts embedded per second beside sentence-transformers: `python -m bench.server.embeddings --texts 2000 --turns 1`.

Both get the same texts of 16 to 512 tokens, number format and threads, tokenize them in the measured time, and take
turns by the clock on the wall. sentence-transformers has the best of several batch sizes, found before with a part of
the texts. It is not among the dependencies: PYTHONPATH names its directory. `--over http` asks a served application.

`--chats 2` measures something else, with a decoder: the gaps between two deltas of so many chats, alone and beside the
texts in the band `batch`. After `--seconds` of each the chats end, and the texts have the rest of the time to
themselves. Wanted: a p99 of at most 1.25 times that alone, and every text embedded.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from bench.engine.engines import make_engine, model_parser, pseudo_random_tokens, warm_runner
from bench.engine.models import SHAPES, model_directory
from bench.record import percentile, write
from bench.serving import REAL, serving
from replicas.engine.config import EngineLimits
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR, ModelOptions, RunnerOptions
from replicas.protocol import Band, GenerateRequest, PoolParams, SamplingParams
from testkit.model.pooling_checkpoints import PoolingFiles

Embed = Callable[[list[str]], np.ndarray]

_LONGEST = 512
"""Most tokens of a text."""
_BATCH_SIZES = (1, 4, 8, 16, 32)
_SHARE_FOR_BATCH_SIZE = 8
_BERT = BertConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=12_288,
    max_position_embeddings=_LONGEST,
)  # fmt: skip
"""all-MiniLM-L6's sizes, with the vocabulary of the demo model."""

_TEXTS_PER_REQUEST, _NUM_REQUESTS = 32, 8
_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS = 32, 128


def main() -> None:
    """Measure, print, record."""
    parser = model_parser(__doc__, name=None, dtype="float32")
    parser.set_defaults(model="bert")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--over", choices=("process", "http"), default="process")
    parser.add_argument("--chats", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(Path(folder), arguments.model)
        texts = _texts(path, arguments.texts)
        if arguments.chats:
            with _served(path, arguments) as http:
                figures = asyncio.run(_beside_chats(http, path.name, texts, arguments))
        else:
            embedder = _served_embedder if arguments.over == "http" else _engine_embedder
            with embedder(path, arguments) as embed:
                figures = _compare(embed, texts, _peer(path, arguments.dtype), arguments.turns)
    if arguments.name:
        print(write(arguments.name, vars(arguments) | figures))


def _checkpoint(parent: Path, model: str) -> Path:
    """Return the checkpoint of a shape with random weights: `bert`, or a decoder of `bench.engine.models`."""
    if model in SHAPES:
        path, files = model_directory(parent, model), PoolingFiles("lasttoken")
        files.write(path, SHAPES[model].hidden_size)
        return path
    path = model_directory(parent, "S")  # For the files of its tokenizer.
    torch.manual_seed(0)
    BertModel(_BERT, add_pooling_layer=False).save_pretrained(path)
    PoolingFiles("mean").write(path, _BERT.hidden_size)
    return path


def _texts(path: Path, num_texts: int) -> list[str]:
    """Return texts of 16 to 512 words, each of which is one token."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = sorted(token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ"))
    encoded = tokenizer([f" {token}" for token in tokens])["input_ids"]
    words = [f" {token}" for token, ids in zip(tokens, encoded, strict=True) if token.isalpha() and len(ids) == 1]
    rng = random.Random(0)
    return ["".join(rng.choices(words, k=rng.randint(16, _LONGEST))) for _ in range(num_texts)]


def _peer(path: Path, dtype: str) -> Any:
    if find_spec("sentence_transformers") is None:
        raise SystemExit("pip install sentence-transformers: the measurement compares with it")
    transformer = import_module("sentence_transformers").SentenceTransformer
    return transformer(str(path), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})


def _compare(embed: Embed, texts: list[str], peer: Any, num_turns: int) -> dict[str, Any]:
    few = texts[::_SHARE_FOR_BATCH_SIZE]
    seconds = {size: _seconds(partial(peer.encode, few, batch_size=size)) for size in _BATCH_SIZES}
    best = min(seconds, key=seconds.__getitem__)
    difference = float(np.abs(peer.encode(few, batch_size=best) - embed(few)).max())
    turns = []
    for _ in range(num_turns):
        theirs = _seconds(lambda: peer.encode(texts, batch_size=best))
        ours = _seconds(lambda: embed(texts))
        turns.append({"headway_s": ours, "sentence_transformers_s": theirs, "load": os.getloadavg()[0]})
        print(f"headway {ours:.1f} s, sentence-transformers {theirs:.1f} s: {theirs / ours:.2f} times", flush=True)
    return {
        "batch_size": best, "turns": turns, "worst_difference": difference,
        "ratio": median(turn["sentence_transformers_s"] / turn["headway_s"] for turn in turns),
    }  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@contextlib.contextmanager
def _engine_embedder(path: Path, arguments: argparse.Namespace) -> Iterator[Embed]:
    """Embed texts with an engine in this process."""
    loaded = load_model(
        ModelOptions(
            str(path), dtype=arguments.dtype, device="cpu", num_threads=arguments.threads,
            kernel_cache_dir=DEFAULT_KERNEL_CACHE_DIR,
        )
    )  # fmt: skip
    head, tokenizer, limits = loaded.head, loaded.tokenizer, EngineLimits()
    assert head is not None and tokenizer is not None
    engine = make_engine(
        warm_runner(loaded, limits, RunnerOptions()),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_queued_requests=arguments.texts,
        max_queued_tokens=arguments.texts * _LONGEST,
        whole_prompts=loaded.is_two_sided,
    )
    params = PoolParams(head.card.task, head.card.pooling)

    def embed(texts: list[str]) -> np.ndarray:
        for number, ids in enumerate(tokenizer(texts)["input_ids"]):
            request = GenerateRequest(str(number), tuple(ids), SamplingParams(max_tokens=0, pool=params))
            engine.add(request, pooler=head.pooler(params, len(ids)))
        vectors: dict[int, np.ndarray] = {}
        while engine.has_work:
            vectors |= {int(delta.request_id): np.frombuffer(delta.pooled, "<f4") for delta in engine.step()}
        return np.stack([vectors[number] for number in range(len(texts))])

    yield embed


@contextlib.contextmanager
def _served(path: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Serve the checkpoint; give the address."""
    fields = {
        "model": path, "dtype": arguments.dtype, "device": "cpu", "num_threads": arguments.threads,
        "cpus_per_replica": 0.5,
    }  # fmt: skip
    with serving(REAL, fields) as served:
        yield served.url


@contextlib.contextmanager
def _served_embedder(path: Path, arguments: argparse.Namespace) -> Iterator[Embed]:
    with _served(path, arguments) as url:
        yield lambda texts: asyncio.run(_embed(url, path.name, texts, Band.STANDARD, []))


async def _embed(url: str, model: str, texts: list[str], band: Band, ends_s: list[float]) -> np.ndarray:
    """Return the vectors of texts, in order, by requests of 32 texts, of which 8 are open at a time.

    `ends_s` gets the time of each text's answer.
    """
    free = asyncio.Semaphore(_NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:

        async def ask(first: int) -> list[np.ndarray]:
            some = texts[first : first + _TEXTS_PER_REQUEST]
            body = {"model": model, "input": some, "encoding_format": "base64", "priority": int(band)}
            async with free:
                answer = (await http.post("/v1/embeddings", json=body)).raise_for_status().json()
            ends_s.extend([time.perf_counter()] * len(some))
            return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]

        parts = await asyncio.gather(*map(ask, range(0, len(texts), _TEXTS_PER_REQUEST)))
    return np.stack(list(itertools.chain.from_iterable(parts)))


async def _chat(url: str, model: str, numbers: Iterator[int], gaps: list[tuple[float, float]]) -> None:
    """Read one interactive stream after another until cancelled; note the time and the seconds of each gap."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        for number in numbers:
            body = {
                "model": model, "prompt": pseudo_random_tokens(number, _NUM_PROMPT_TOKENS), "ignore_eos": True,
                "max_tokens": _NUM_OUTPUT_TOKENS, "stream": True, "priority": int(Band.INTERACTIVE),
                "return_token_ids": True,  # Random weights write little text; each token has its delta all the same.
            }  # fmt: skip
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                before_s: float | None = None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.perf_counter()
                        if before_s is not None:
                            gaps.append((now_s, now_s - before_s))
                        before_s = now_s


async def _beside_chats(url: str, model: str, texts: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the chats alone, beside the texts, and then the texts alone."""
    gaps: list[tuple[float, float]] = []
    numbers = itertools.count()
    chats = [asyncio.create_task(_chat(url, model, numbers, gaps)) for _ in range(arguments.chats)]
    await asyncio.sleep(arguments.seconds / 4)  # The chats settle.
    alone_s = time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    beside_s = time.perf_counter()
    ends_s: list[float] = []
    embedding = asyncio.create_task(_embed(url, model, texts, Band.BATCH, ends_s))
    await asyncio.sleep(arguments.seconds)
    ended_s, num_embedded = time.perf_counter(), len(ends_s)
    for chat in chats:
        chat.cancel()
    vectors = await embedding
    rest_s = time.perf_counter() - ended_s
    assert len(vectors) == len(texts) and np.isfinite(vectors).all()
    alone_ms, beside_ms = (
        [1e3 * gap_s for moment_s, gap_s in gaps if begins_s <= moment_s < until_s]
        for begins_s, until_s in ((alone_s, beside_s), (beside_s, ended_s))
    )
    figures: dict[str, Any] = {
        name: {"p50": percentile(gaps_ms, 50), "p99": percentile(gaps_ms, 99), "gaps": len(gaps_ms)}
        for name, gaps_ms in (("alone_ms", alone_ms), ("beside_ms", beside_ms))
    }
    figures |= {
        "ratio_p99": figures["beside_ms"]["p99"] / figures["alone_ms"]["p99"],
        "texts_beside_per_s": num_embedded / arguments.seconds,
        "texts_alone_per_s": (len(texts) - num_embedded) / rest_s,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(figures, indent=2))
    return figures


if __name__ == "__main__":
    main()
