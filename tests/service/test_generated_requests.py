"""Requests that schemathesis generates from the OpenAPI document: every answer is as documented, none is a failure."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from serve_app.openai.request.validation import RequestLimits
from testkit.http.local_service import local_service

ROOT = Path(__file__).resolve().parents[2]
DURATION_S = 60
LIMIT_S = 10 * DURATION_S
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "documented_answer",
)


@pytest.mark.deep
async def test_answers_to_generated_requests_are_as_documented(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1, max_model_len=64),
        RunnerOptions(kv_cache_bytes=2**20),
        EngineLimits(max_num_seqs=16, max_num_batched_tokens=64),
        StreamOptions(),
    )
    limits = RequestLimits(max_choices=8, max_prompts=8)
    settings = IngressSettings(model=str(checkpoint), served_model_name="tiny", limits=limits)
    async with local_service(options, settings, tmp_path) as local:
        assert await schemathesis(local.url, tmp_path) == 0


async def schemathesis(url: str, folder: Path) -> int:
    """Run schemathesis against a server; return its exit status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "testkit.http.fuzz_checks"}
    arguments = ["--phases=fuzzing,stateful", f"--max-time={DURATION_S}", "--seed=1", "--suppress-health-check=all"]
    arguments.append("--exclude-path=/dashboard/events")  # Its stream has no end.
    program = Path(sys.executable).parent / "schemathesis"
    process = await asyncio.create_subprocess_exec(
        program, "run", f"{url}/openapi.json", *arguments, f"--checks={','.join(CHECKS)}", cwd=folder, env=environment
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
