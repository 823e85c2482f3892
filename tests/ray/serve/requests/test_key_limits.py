"""Limits of an API key over two ingresses, which tell each other that they use it."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.keys.key_file import digest_of
from testkit.limits import LIMIT_S
from testkit.serving.served import Served, serving, wait_for
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.deep

_LIMIT = 60
"""Requests a minute."""


@pytest.fixture
def two_ingresses(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys.yaml"
    limited = {"tenant": "acme", "requests_per_minute": _LIMIT}
    keys.write_text(yaml.safe_dump({digest_of("acme"): limited, digest_of("ops"): {"tenant": "ops", "operator": True}}))
    arguments = f"kv_cache_bytes=64MiB api_key_file={keys} num_ingress_replicas=2"
    with serving(tmp_path, f"MODEL={checkpoint}", "REPLICAS=1", "DTYPE=float32", f"ARGS={arguments}", key="ops") as app:
        yield app


def num_accepted(app: Served, count: int) -> int:
    """Send requests one after another, each over a connection of its own; return the number of those accepted."""
    statuses = []
    for _ in range(count):
        answer = httpx.post(
            f"{app.url}/v1/completions",
            json={"model": MODEL_NAME, "prompt": "the", "max_tokens": 1},
            headers={"authorization": "Bearer acme"},
            timeout=LIMIT_S,
        )
        assert answer.status_code in (200, 429), answer.text
        statuses.append(answer.status_code)
    return statuses.count(200)


def test_two_ingresses_together_keep_a_keys_requests(two_ingresses: Served) -> None:
    app = two_ingresses

    def num_ingresses() -> int:
        return sum(replica["state"] == "RUNNING" for replica in app.deployment("Ingress")["replicas"])

    wait_for(lambda: num_ingresses() == 2, "both ingresses run")
    started_s = time.monotonic()
    accepted = num_accepted(app, 4 * _LIMIT)
    filled = (time.monotonic() - started_s) * _LIMIT / 60
    # At once seven tenths, then the rate; a tenth is for the time in which each does not know of the other.
    assert 0.9 * filled <= accepted <= 0.7 * _LIMIT + filled + 0.1 * _LIMIT
