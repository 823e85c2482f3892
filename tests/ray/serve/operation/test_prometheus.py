"""A real Prometheus scrapes an ingress and Ray's exporter under load, and answers the queries of all dashboards.

The dashboards are the two of Headway, the one for LLMs that Ray ships, and the one that vLLM publishes.
"""

import asyncio
import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_serve_llm_grafana_dashboard

from serve_app.monitoring.grafana import Source, dashboard
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.metrics_page import MetricRow, sections
from testkit.serving.batch_calls import ended, line, submit
from testkit.serving.prometheus import PROMETHEUS, Prometheus, prometheus
from testkit.serving.served import Served, wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.serve.conftest import HEADERS, KEY

pytestmark = [pytest.mark.deep, pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus here")]

LOAD_S = 70.0
"""A query of Ray's dashboard looks at whole minutes."""
INTERVAL = "30s"
"""Range of the rates; Ray's exporter has new values every 10 s."""
STILL_S = 20
"""Seconds for which a counter stands still once Ray's exporter has its last value."""
NUM_CLIENTS = 9
BANDS = ("interactive", "standard", "batch")
TOLERANCE = 0.02
ELSEWHERE = re.compile(r"ray_vllm_(nixl|kv_offload|external_prefix_cache)_")
"""Metrics of KV transfer and offload, which this engine does not have."""
VARIABLES = {
    "$__rate_interval": INTERVAL,
    "$interval": INTERVAL,
    "$vllm_model_name": ".*",
    "$model_name": MODEL_NAME,
    "$workerid": ".*",
    "$deployment": ".*",
    "$Cluster": ".*",
}


def _of_vllm(metric: str) -> Iterator[str]:
    for quantile in (0.99, 0.95, 0.9, 0.5):
        rate = f'rate({metric}_bucket{{model_name="$model_name"}}[$__rate_interval])'
        yield f"histogram_quantile({quantile}, sum by(le) ({rate}))"
    sums = (f'rate({metric}_{each}{{model_name="$model_name"}}[$__rate_interval])' for each in ("sum", "count"))
    yield " / ".join(sums)


VLLM_QUERIES = (
    *_of_vllm("vllm:e2e_request_latency_seconds"),
    *_of_vllm("vllm:inter_token_latency_seconds"),
    *_of_vllm("vllm:time_to_first_token_seconds"),
    'rate(vllm:prompt_tokens_total{model_name="$model_name"}[$__rate_interval])',
    'rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])',
    'vllm:num_requests_running{model_name="$model_name"}',
    'vllm:num_requests_waiting{model_name="$model_name"}',
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',
    'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}[$__rate_interval]))',
    'sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="$model_name"}[$__rate_interval]))',
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
    'rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
    'rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
    'rate(vllm:request_decode_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
    'rate(vllm:request_max_num_generation_tokens_sum{model_name="$model_name"}[$__rate_interval])',
)
"""Queries of vLLM's dashboard for Grafana (examples/observability/prometheus_grafana in its repository)."""


def queries_of(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the queries of a dashboard's panels, also of those in rows that are closed."""
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()) if not ELSEWHERE.search(target["expr"]))
        yield from queries_of(panel.get("panels", []))


def filled(expr: str) -> str:
    """Return a query with values in place of Grafana's variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def ray_folder(app: Served) -> Path:
    return Path(app.places["token_path"]).parent / "ray" / "session_latest"


@pytest.fixture(scope="module")
def server(app: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text(KEY)
    discovery = ray_folder(app) / "prom_metrics_service_discovery.json"
    jobs: list[dict[str, Any]] = [
        {
            "job_name": "headway",
            "static_configs": [{"targets": [app.url.removeprefix("http://")]}],
            "authorization": {"type": "Bearer", "credentials_file": str(key)},
        },
        {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)]}]},
    ]
    with prometheus(tmp_path_factory.mktemp("prometheus"), jobs) as found:
        wait_for(lambda: _are_up(found), "both roads are scraped", period_s=0.5)
        yield found


def _are_up(server: Prometheus) -> bool:
    targets = server.targets()
    return {each["labels"]["job"] for each in targets if each["health"] == "up"} == {"headway", "ray"}


class Load:
    """Clients of all bands, which ask one question after the other, and a batch."""

    def __init__(self, app: Served) -> None:
        self._app = app
        self.num_output_tokens = 0
        self.num_answers = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            httpx.AsyncClient(base_url=self._app.url, headers=HEADERS, timeout=LIMIT_S, trust_env=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            end_s = time.monotonic() + LOAD_S
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._ask(http, number, end_s))
            yield

    async def _ask(self, http: httpx.AsyncClient, number: int, end_s: float) -> None:
        prompt = f"client {number} " + "the quick brown fox jumps over the lazy dog " * 4
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "n": 1 + number % 2}
        headers = {"x-headway-priority": BANDS[number % len(BANDS)]}
        while time.monotonic() < end_s:
            answer = (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status().json()
            self.num_output_tokens += answer["usage"]["completion_tokens"]
            self.num_answers += 1


def without_data(server: Prometheus, queries: set[str]) -> list[str]:
    """Return the queries that have no value, or none that is a number."""
    return [each for each in queries if not any(not math.isnan(found.value) for found in server.query(filled(each)))]


def all_queries() -> dict[str, set[str]]:
    """Return the queries of each dashboard."""
    content, _ = generate_serve_llm_grafana_dashboard()
    return {
        "Ray's": set(queries_of(json.loads(content)["panels"])),
        "vLLM's": set(VLLM_QUERIES),
        **{source.value: set(queries_of(dashboard(source)["panels"])) for source in Source},
    }


def total(server: Prometheus, name: str) -> float:
    return sum(sample.value for sample in server.query(f"sum({name})"))


def pairs(rows: list[MetricRow]) -> dict[str, str]:
    """Return the names of the sums that both roads have: counters, and counts and buckets of histograms.

    Ray computes the sum of a histogram from the middles of its buckets.
    """
    found: dict[str, str] = {}
    for row in rows:
        if row.name_at_ray is None or row.kind not in ("counter", "histogram"):
            continue
        # Ray has no bucket of zeros.
        suffixes = ("",) if row.kind == "counter" else ("_count", '_bucket{le!~"0|0.0"}')
        found |= {row.name + suffix: row.name_at_ray + suffix for suffix in suffixes}
    return found


def wait_until_still(read: Callable[[], float]) -> float:
    """Return a value once it has been the same for `STILL_S`."""
    seen = [read()]

    def is_still() -> bool:
        seen.append(read())
        return len(seen) > STILL_S and len(set(seen[-STILL_S:])) == 1

    wait_for(is_still, "the counters stand still", START_LIMIT_S, period_s=1.0)
    return seen[-1]


async def test_every_query_has_data_and_two_roads_agree(app: Served, client: openai.OpenAI, server: Prometheus) -> None:
    before = total(server, "vllm:generation_tokens_total")
    load = Load(app)
    async with load.running():
        batch = await asyncio.to_thread(lambda: submit(client, *(line(f"l-{number}") for number in range(40))))
        await asyncio.sleep(LOAD_S - 5)
        empty = {
            name: await asyncio.to_thread(without_data, server, queries) for name, queries in all_queries().items()
        }
    rows = [row for of_part in (await sections()).values() for row in of_part]
    # A counter appears at Ray's exporter with its first event.
    still = [at_ray for name, at_ray in pairs(rows).items() if not total(server, name)]
    assert [each for queries in empty.values() for each in queries if not any(name in each for name in still)] == []
    await asyncio.to_thread(ended, client, batch)
    assert load.num_answers > NUM_CLIENTS
    generated = await asyncio.to_thread(wait_until_still, lambda: total(server, "ray_vllm_generation_tokens_total"))
    assert generated - before == pytest.approx(load.num_output_tokens + 40 * 8, rel=TOLERANCE)
    sums = {pair: tuple(total(server, each) for each in pair) for pair in pairs(rows).items()}
    assert len(sums) > 50 and sum(one > 0 for one, _ in sums.values()) > 40
    assert {pair: found for pair, found in sums.items() if found[0] != pytest.approx(found[1], rel=TOLERANCE)} == {}


def test_the_documented_command_puts_the_dashboards_beside_rays(app: Served) -> None:
    folder = ray_folder(app) / "metrics" / "grafana" / "dashboards"
    command = [sys.executable, "-m", "serve_app.cli.main", "grafana", str(folder)]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    titles = {json.loads(path.read_text())["title"] for path in folder.glob("*.json")}
    assert {"Headway", "Headway (Ray)", "Serve LLM Dashboard"} <= titles
