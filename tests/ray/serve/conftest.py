"""One `make serve` for all tests that only use it: two replicas of a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S
from testkit.serving.served import Served, serving

NUM_SLOTS = 4
"""Sequences that run together in each of the two replicas."""
KEY = "acme"
"""The API key, and the tenant, of the application's clients."""
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="package")
def app(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A served application that tests share and leave as they found it; it asks for keys."""
    home = tmp_path_factory.mktemp("home")
    keys = write_keys(home, KEY, operator=KEY)
    arguments = f"max_num_seqs={NUM_SLOTS} kv_cache_bytes=64MiB load_poll_period_s=0.2 api_key_file={keys}"
    with serving(home, f"MODEL={checkpoint}", "REPLICAS=2", "DTYPE=float32", f"ARGS={arguments}", key=KEY) as instance:
        yield instance


@pytest.fixture
def client(app: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def http(app: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.url, headers=HEADERS, timeout=LIMIT_S) as http:
        yield http
