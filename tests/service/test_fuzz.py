"""Random, malformed, oversized, slow and abandoned requests: no failure, no hang, one shape of errors, nothing left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from serve_app.openai.request.validation import RequestLimits
from testkit.http.fuzzer import Fuzzer
from testkit.http.local_service import local_service
from testkit.model.pooling_checkpoints import PoolingFiles, write_embedder, write_yes_no_reranker
from tests.seeds import Seeds
from tests.service.conftest import MODEL

pytestmark = pytest.mark.rotated

NUM_CASES = 200


def embedder(path: Path) -> Path:
    files = PoolingFiles("mean", prompts={"query": "find: "})
    return write_embedder(path, "qwen3", files, matryoshka_dimensions=[16, 32])


def reranker(path: Path) -> Path:
    return write_yes_no_reranker(path, "qwen3", 40, 41)


@pytest.mark.random_worlds(3, per_call=1)
@pytest.mark.parametrize("write", [embedder, reranker])
async def test_no_request_is_the_servers_failure(write: Callable[[Path], Path], tmp_path: Path, seeds: Seeds) -> None:
    """Each of the models generates tokens, too."""
    checkpoint = write(tmp_path / MODEL)
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1, max_model_len=128),
        RunnerOptions(kv_cache_bytes=2**20),
        EngineLimits(max_num_seqs=16, max_num_batched_tokens=64),
        StreamOptions(),
    )
    limits = RequestLimits(max_choices=16, max_prompts=16)
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL, limits=limits, upload_timeout_s=5.0)
    for seed in seeds:
        async with local_service(options, settings, tmp_path) as local:
            report = await Fuzzer(local.url, seed, MODEL).run(range(NUM_CASES))
        assert not report.problems, "\n".join(report.problems)
