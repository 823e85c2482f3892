"""Ten thousand random requests against `make serve`: no failure, no hang, nothing left, bounded memory."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from testkit.http.fuzzer import Fuzzer
from testkit.http.scripted_dispatcher import write_keys
from testkit.serving.served import Served, serving
from tests.ray.conftest import MODEL_NAME
from tests.ray.serve.conftest import KEY

pytestmark = pytest.mark.deep

NUM_CASES = 10_000
MAX_GROWTH_BYTES = 400 * 2**20
"""Most memory that an ingress may grow by: a few bodies of 8 MiB, parsed, and the allocator's rest."""
ARGUMENTS = {
    "max_model_len": 128, "kv_cache_bytes": "16MiB", "max_prompts": 16, "upload_timeout_s": 5,
    "load_poll_period_s": 0.2,
}  # fmt: skip


def ingress(app: Served) -> psutil.Process:
    process = app.find("ray::ServeReplica:headway:Ingress")
    assert process is not None
    return process


@pytest.mark.parametrize("has_keys", [False, True])
def test_ten_thousand_random_requests(checkpoint: Path, tmp_path: Path, has_keys: bool) -> None:
    fields = ARGUMENTS | ({"api_key_file": write_keys(tmp_path, KEY, operator=KEY)} if has_keys else {})
    arguments = " ".join(f"{name}={value}" for name, value in fields.items())
    key = KEY if has_keys else None
    with serving(tmp_path, f"MODEL={checkpoint}", f"ARGS={arguments}", key=key) as app:
        before = ingress(app)
        first = before.memory_info().rss
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        report = asyncio.run(Fuzzer(app.url, 23, MODEL_NAME, headers).run(range(NUM_CASES // 2)))
        print(json.dumps(report.answers), f"slowest {report.slowest_s:.1f} s")
        assert not report.problems, "\n".join(report.problems)
        assert ingress(app).pid == before.pid, "the ingress was replaced"
        grown = before.memory_info().rss - first
        assert grown < MAX_GROWTH_BYTES, f"the ingress has grown by {grown / 2**20:.0f} MiB"
