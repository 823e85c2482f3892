"""Quantized checkpoints, hybrids and Gemma 4 through `make serve`.

Streams that lose their replica give the tokens of undisturbed ones.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGMLQuantizationType

from bench.structured.structured_failover import kill_busiest
from serve_app.cli.clients.events import read_events
from testkit.limits import LIMIT_S
from testkit.model.compiled_kernels import need_kernels
from testkit.model.quantized_checkpoints import METHODS, quantize_checkpoint
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.model.tiny_gguf import write_gguf
from testkit.serving.served import OUTPUT, Served, serving, wait_for

pytestmark = pytest.mark.deep

GGUF_KINDS = [kind.name for kind in (
    GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q2_K, GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.IQ4_XS,
)]  # fmt: skip
OTHERS = ["compressed-tensors W8A8", "compressed-tensors W8A16", "GPTQ 8 bits", "bitsandbytes int8"]
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
SETTINGS = (
    "num_replicas=2 device=cpu num_threads=1 cpus_per_replica=0.5 kv_cache_bytes=64MiB kv_cache_dtype=int8 "
    "load_poll_period_s=0.2"
)
NUM_CHUNKS_BEFORE = 5


def checkpoint(name: str, directory: Path) -> Path:
    plain = write_checkpoint(directory / "plain", **SIZES)
    if name in GGUF_KINDS:
        return write_gguf(directory / "tiny.gguf", plain, GGMLQuantizationType[name])
    return quantize_checkpoint(plain, directory / "quantized", METHODS[name])


def stream(app: Served, *, kills: bool) -> str:
    """Return the text of a stream, whose replica is killed if `kills`."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "seed": 7, "stream": True}
    text, num_chunks, reason = "", 0, None
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
        assert response.status_code == 200
        for event in read_events(response):
            [choice] = event["choices"]
            text, num_chunks, reason = text + choice["text"], num_chunks + 1, choice["finish_reason"]
            if kills and num_chunks == NUM_CHUNKS_BEFORE:
                assert reason is None and kill_busiest(app) == response.headers["x-model-replica"]
    assert reason == "length"
    return text


def check_streams(model: Path, home: Path, dtype: str) -> None:
    """Check that the stream of a killed replica is that of an undisturbed one."""
    with serving(home, f"MODEL={model}", f"ARGS={SETTINGS} served_model_name=tiny dtype={dtype}") as app:
        wait_for(lambda: len(app.replicas()) == 2, "two replicas serve")
        calm, stormy = (stream(app, kills=kills) for kills in (False, True))
    assert stormy == calm and len(set(calm)) > 10


@pytest.mark.parametrize("name", [*GGUF_KINDS, *OTHERS])
def test_a_stream_of_a_killed_replica_goes_on(name: str, tmp_path: Path) -> None:
    need_kernels()
    check_streams(checkpoint(name, tmp_path), tmp_path, "bfloat16")
    report = (tmp_path / OUTPUT).read_text()
    assert "kept in" in report and " tokens in int8: " in report


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen3_5_text-16", "bfloat16"), ("nemotron_h", "float32"), ("gemma4_text-window", "float32")],
)
def test_a_stream_with_recurrent_state_or_windows_goes_on(architecture: str, dtype: str, tmp_path: Path) -> None:
    need_kernels()
    model = write_checkpoint(tmp_path / "plain", architecture, max_position_embeddings=8192)
    check_streams(model, tmp_path, dtype)
