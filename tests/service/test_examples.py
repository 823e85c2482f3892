"""The examples of the API reference work as they are: each runs in a shell and in Python, against a real service."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from serve_app.reference.examples import URL
from testkit.http.local_service import local_service
from testkit.http.python_programs import python_programs
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S
from testkit.model.pooling_checkpoints import PoolingFiles, write_embedder

MODEL = "it's tiny"
KEY = "ops"
HAS_NO_REPLICA_TO_DRAIN = "/v1/replicas/{replica_id}/drain"
"""The service has one replica, which does not drain; tests/ray/serve/requests/test_replicas.py drains one."""
SCORES = ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
"""The service's model generates and embeds; tests/service/test_embeddings.py has one that scores."""
CANCELLATIONS = {
    "post /v1/requests/{request_id}/cancel", "post /v1/batches/{batch_id}/cancel", "post /v1/batch/{batch_id}/cancel",
    "post /v1/messages/batches/{message_batch_id}/cancel", "delete /v1/jobs/{job_id}",
}  # fmt: skip
"""The work of these examples may have ended when it is to be cancelled, which the answer says."""
OF_ENDED = {
    "delete /v1/messages/batches/{message_batch_id}", "get /v1/messages/batches/{message_batch_id}/results",
}  # fmt: skip
"""The work of these examples may not have ended, which the answer says."""

Run = Callable[[str, Path, dict[str, str]], Awaitable[tuple[int, str]]]
"""Runs a program in a folder with an environment; its exit status and its output."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    torch.set_num_threads(1)
    checkpoint = write_embedder(tmp_path_factory.mktemp("model"), "llama", PoolingFiles())
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**20),
        EngineLimits(max_num_seqs=16),
    )
    folder = tmp_path_factory.mktemp("data")
    keys = write_keys(folder, KEY, operator=KEY)
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL, api_key_file=keys)
    async with local_service(options, settings, folder) as service:
        yield service.url


async def run_in_shell(source: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run an example; return its exit status and its output. curl fails for an error's status, as Python does."""
    (folder / ".curlrc").write_text("fail-with-body\n")
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", source, cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.parametrize("language", ["Shell", "Python"])
async def test_every_example_works_as_it_is(url: str, tmp_path: Path, language: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        document: dict[str, Any] = (await http.get("/openapi.json")).json()
    async with python_programs() as programs:
        run = run_in_shell if language == "Shell" else programs.run
        await check_examples(document, url, language, run, tmp_path)


async def check_examples(document: dict[str, Any], url: str, language: str, run: Run, folder: Path) -> None:
    environment = {**os.environ, "HOME": str(folder), "API_KEY": KEY}
    failures, num_run = [], 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            [source] = [each["source"] for each in operation["x-codeSamples"] if each["lang"] == language]
            status, output = await run(source.replace(URL, url), folder, environment)
            num_run += 1
            if f"{method} {path}" in CANCELLATIONS:
                is_right = status == 0 or "not_cancellable" in output or "409" in output
            elif f"{method} {path}" in OF_ENDED:
                is_right = status == 0 or "batch_in_progress" in output or "409" in output
            elif path == HAS_NO_REPLICA_TO_DRAIN:
                is_right = status != 0 and ("replica_not_found" in output or "404" in output)
            elif path in SCORES:
                is_right = status != 0 and ("no scores" in output or "400" in output)
            elif path == "/dashboard/events":
                is_right = '"replicas"' in output
            else:
                is_right = status == 0 and (method == "delete" or bool(output.strip()))
            if not is_right:
                failures.append(f"{method} {path}: exit status {status}\n{source}\n{output}")
    assert num_run > 35
    assert not failures, "\n\n".join(failures)


async def test_examples_of_bodies_are_valid_and_name_the_model_first(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        document: dict[str, Any] = (await http.get("/openapi.json")).json()
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]
        for path, methods in document["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert all(body["example"] for body in bodies.values())
    assert json.dumps(bodies["/v1/chat/completions"]["example"]).startswith('{"model": "it\'s tiny", "messages"')
    for name in ("ChatBody", "CompletionBody"):
        fields = list(document["components"]["schemas"][name]["properties"])
        assert fields[:2] == ["model", "messages" if name == "ChatBody" else "prompt"]
