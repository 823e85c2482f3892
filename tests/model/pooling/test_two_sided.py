"""Whole texts of encoders and two-sided decoders against transformers' own models, packed into steps."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.errors import UnsupportedModel
from replicas.model.build import build_fitted, warm_up
from replicas.model.loading.check_model import check_model
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.protocol import GenerateRequest, PoolParams, SamplingParams
from testkit.model.engine_runs import Sizes, engine_over, load, load_compiled, random_prompts, run
from testkit.model.pooling_checkpoints import PoolingFiles, expected_vectors, write_classifier, write_encoder

pytestmark = pytest.mark.rotated

LENGTHS = [1, 2, 40, 100, 71, 200, 256, 3, 17, 255, 90]
DEFAULTS = RunnerOptions()
CASES = {
    "bert": PoolingFiles("mean"),
    "xlm-roberta": PoolingFiles("cls", dense_size=24),
    "modernbert": PoolingFiles("mean", normalizes=False),
    "nomic_bert": PoolingFiles("mean"),
    "gemma3_text": PoolingFiles("mean"),
}


def write_bert_scorer(path: Path) -> Path:
    return write_classifier(path, "bert")


def engine_of(loaded: LoadedModel, options: RunnerOptions = DEFAULTS) -> Engine:
    fitted = build_fitted(loaded, EngineLimits(16, 4, 256), options)
    warm_up(fitted.runner, fitted.limits)
    sizes = Sizes(fitted.runner.num_blocks, max_num_batched_tokens=256, max_num_seqs=4)
    return engine_over(fitted.runner, loaded, sizes)


def outputs(loaded: LoadedModel, texts: list[tuple[int, ...]], options: RunnerOptions = DEFAULTS) -> torch.Tensor:
    assert loaded.head is not None
    card = loaded.head.card
    params = SamplingParams(max_tokens=0, pool=PoolParams(card.task, card.pooling))
    requests = [GenerateRequest(f"text-{index}", text, params) for index, text in enumerate(texts)]
    deltas = run(engine_of(loaded, options), requests, loaded.head)
    assert all(delta.error is None for delta in deltas), [delta.error for delta in deltas]
    return torch.tensor(np.stack([np.frombuffer(delta.pooled, "<f4") for delta in deltas]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("load_model", [load, load_compiled])
@pytest.mark.parametrize("family", CASES)
def test_vectors_of_whole_texts_are_those_of_transformers(
    tmp_path: Path, family: str, load_model: Callable[[Path], LoadedModel]
) -> None:
    path, texts = write_encoder(tmp_path, family, CASES[family]), random_prompts(LENGTHS)
    loaded = load_model(path)
    assert not loaded.generates and not loaded.layers
    torch.testing.assert_close(outputs(loaded, texts), expected_vectors(path, texts, CASES[family]), atol=1e-5, rtol=0)
    assert check_model(path).kv_numbers is None


@pytest.mark.parametrize("family", CASES)
def test_vectors_in_bfloat16_are_near_those_in_float32(tmp_path: Path, family: str) -> None:
    path, texts = write_encoder(tmp_path, family, CASES[family]), random_prompts(LENGTHS)
    found, expected = outputs(load(path, dtype="bfloat16"), texts), expected_vectors(path, texts, CASES[family])
    assert torch.cosine_similarity(found, expected).min() > 0.99


@pytest.mark.parametrize("write", [lambda path: write_encoder(path, "bert", PoolingFiles("mean")), write_bert_scorer])
def test_a_checkpoint_in_several_files_gives_the_same_vectors(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    texts = random_prompts([5, 40])
    whole = outputs(load(write(tmp_path / "whole")), texts)
    path = write(tmp_path / "sharded")
    (path / "model.safetensors").rename(tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    halves = (sorted(weights)[::2], sorted(weights)[1::2])
    places = {}
    for number, names in enumerate(halves):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, path / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(outputs(load(path), texts), whole)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3"])
def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = write_classifier(tmp_path, family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    pairs = [("the fox", "a lazy dog"), ("a", "the quick brown fox jumps over the lazy dog"), ("more", "some")]
    encoded = [tokenizer(*pair, return_tensors="pt", return_token_type_ids=True) for pair in pairs]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = [
            model.eval()(
                input_ids=one["input_ids"],
                **({"token_type_ids": one["token_type_ids"]} if family == "bert" else {}),
            ).logits[0]
            for one in encoded
        ]
    loaded = load(path)
    texts = [tuple(one["input_ids"][0].tolist()) for one in encoded]
    torch.testing.assert_close(outputs(loaded, texts), torch.sigmoid(torch.stack(logits)), atol=1e-5, rtol=0)


def test_an_encoder_without_files_of_a_pooling_is_refused_by_name(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "bert", PoolingFiles())
    (path / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match="describe no pooling"):
        load(path)
