"""Texts embedded per second beside sentence-transformers: `python -m bench.engine.embeddings --texts 2000 --turns 3`.

Both get the same texts of 16 to 512 tokens, number format and threads, tokenize them in the measured time, and take
turns. sentence-transformers has the best of several batch sizes, found before with a part of the texts. It is not among
the dependencies. Times are the processor's, so that other programs on the machine change little.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from bench.engine.engines import make_engine, model_parser, warm_runner
from bench.engine.models import SHAPES, model_directory
from bench.record import write
from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.model.loading.loader import LoadedModel, load_model
from replicas.model.loading.options import DEFAULT_KERNEL_CACHE_DIR, ModelOptions, RunnerOptions
from replicas.protocol import GenerateRequest, PoolParams, SamplingParams
from testkit.model.pooling_checkpoints import PoolingFiles

_LONGEST = 512
"""Most tokens of a text."""
_BATCH_SIZES = (1, 4, 8, 16, 32)
_SHARE_FOR_BATCH_SIZE = 8
_BERT = BertConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=12_288,
    max_position_embeddings=_LONGEST,
)  # fmt: skip
"""all-MiniLM-L6's sizes, with the vocabulary of the demo model."""


def main() -> None:
    """Measure, print, record."""
    parser = model_parser(__doc__, name=None, num_threads=1, dtype="float32")
    parser.set_defaults(model="bert")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if find_spec("sentence_transformers") is None:
        raise SystemExit("pip install sentence-transformers: the measurement compares with it")
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(Path(folder), arguments.model)
        loaded = load_model(
            ModelOptions(
                str(path), dtype=arguments.dtype, device="cpu", num_threads=arguments.threads,
                kernel_cache_dir=DEFAULT_KERNEL_CACHE_DIR,
            )
        )  # fmt: skip
        figures = _measure(loaded, _texts(loaded, arguments.texts), path, arguments.turns)
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


def _texts(loaded: LoadedModel, num_texts: int) -> list[str]:
    """Return texts of 16 to 512 words, each of which is one token."""
    assert loaded.tokenizer is not None
    tokens = sorted(token[1:] for token in loaded.tokenizer.get_vocab() if token.startswith("Ġ"))
    encoded = loaded.tokenizer([f" {token}" for token in tokens])["input_ids"]
    words = [f" {token}" for token, ids in zip(tokens, encoded, strict=True) if token.isalpha() and len(ids) == 1]
    rng = random.Random(0)
    return ["".join(rng.choices(words, k=rng.randint(16, _LONGEST))) for _ in range(num_texts)]


def _measure(loaded: LoadedModel, texts: list[str], path: Path, num_turns: int) -> dict[str, Any]:
    peer = import_module("sentence_transformers").SentenceTransformer(
        str(path), device="cpu", model_kwargs={"dtype": loaded.dtype}
    )
    limits = EngineLimits()
    runner = warm_runner(loaded, limits, RunnerOptions())
    engine = make_engine(
        runner,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        whole_prompts=loaded.is_two_sided,
    )
    few = texts[::_SHARE_FOR_BATCH_SIZE]
    seconds = {size: _seconds(lambda size=size: peer.encode(few, batch_size=size)) for size in _BATCH_SIZES}
    best = min(seconds, key=seconds.__getitem__)
    expected, found = peer.encode(few, batch_size=best), _embed(engine, loaded, few)
    turns = []
    for _ in range(num_turns):
        theirs = _seconds(lambda: peer.encode(texts, batch_size=best))
        ours = _seconds(lambda: _embed(engine, loaded, texts))
        turns.append({"headway_s": ours, "sentence_transformers_s": theirs, "load": os.getloadavg()[0]})
        print(f"headway {ours:.1f} s, sentence-transformers {theirs:.1f} s: {theirs / ours:.2f} times", flush=True)
    return {
        "batch_size": best, "turns": turns, "worst_difference": float(np.abs(expected - found).max()),
        "ratio": median(turn["sentence_transformers_s"] / turn["headway_s"] for turn in turns),
    }  # fmt: skip


def _seconds(work: Any) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def _embed(engine: Engine, loaded: LoadedModel, texts: list[str]) -> np.ndarray:
    """Return the vectors of texts, in order."""
    assert loaded.head is not None and loaded.tokenizer is not None
    params = PoolParams(loaded.head.card.task, loaded.head.card.pooling)
    for number, ids in enumerate(loaded.tokenizer(texts)["input_ids"]):
        request = GenerateRequest(str(number), tuple(ids), SamplingParams(max_tokens=0, pool=params))
        engine.add(request, pooler=loaded.head.pooler(params, len(ids)))
    vectors: dict[int, np.ndarray] = {}
    while engine.has_work:
        vectors |= {int(delta.request_id): np.frombuffer(delta.pooled, "<f4") for delta in engine.step()}
    return np.stack([vectors[number] for number in range(len(texts))])


if __name__ == "__main__":
    main()
