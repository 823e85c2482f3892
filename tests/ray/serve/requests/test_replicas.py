"""Two replicas behind one ingress: both serve, and the load shows what they hold."""

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from testkit.limits import LIMIT_S
from testkit.serving.served import OUTPUT, Served, wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.serve.conftest import HEADERS, KEY, NUM_SLOTS


def held(app: Served) -> int:
    """Requests that are running, waiting or on their way."""
    return sum(replica["num_running"] + replica["num_waiting"] + replica["num_in_flight"] for replica in app.replicas())


def wait_until_idle(app: Served) -> None:
    wait_for(lambda: held(app) == 0, "every replica is idle")
    for replica in app.replicas():
        assert replica["num_free_blocks"] == replica["num_blocks"]


def body(max_tokens: int, **fields) -> dict:
    return {
        "model": MODEL_NAME,
        "prompt": "the quick brown fox",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


def test_load_shows_both_replicas_with_their_place_and_age(app):
    replicas = wait_for(lambda: len(found := app.replicas()) == 2 and found, "both replicas are known")
    assert len({replica["pid"] for replica in replicas}) == 2
    assert all(replica["num_slots"] == NUM_SLOTS for replica in replicas)
    assert all(replica["node_id"] for replica in replicas)
    wait_for(lambda: max(replica["age_s"] for replica in app.replicas()) < 1.0, "the poll keeps the load fresh")


def test_the_dashboard_lists_ingress_and_replicas_as_running(app):
    [application] = app.applications().values()
    assert application["status"] == "RUNNING"
    states = {
        name: [replica["state"] for replica in deployment["replicas"]]
        for name, deployment in application["deployments"].items()
    }
    assert states == {"Ingress": ["RUNNING"], "Jobs": ["RUNNING"], "Model": ["RUNNING", "RUNNING"]}


def test_more_requests_than_slots_are_all_answered(app):
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:

            async def ask(index: int) -> str:
                reply = await client.completions.with_raw_response.create(
                    model=MODEL_NAME, prompt=f"request {index}", max_tokens=16, extra_body={"ignore_eos": True}
                )
                usage = reply.parse().usage
                assert usage is not None and usage.completion_tokens == 16
                return reply.headers["x-model-replica"]

            return list(await asyncio.gather(*(ask(index) for index in range(20 * NUM_SLOTS))))

    served = Counter(asyncio.run(ask_all()))
    assert len(served) == 2
    assert min(served.values()) >= 5 * NUM_SLOTS
    wait_until_idle(app)


def test_running_load_shows_on_both_replicas(app):
    def both_busy() -> bool:
        return all(replica["num_running"] > 0 for replica in app.replicas())

    with httpx.Client(base_url=app.url, headers=HEADERS, timeout=LIMIT_S) as http:
        streams = [
            http.stream("POST", "/v1/completions", json=body(20_000, stream=True, user=str(index)))
            for index in range(2)
        ]
        for stream in streams:
            stream.__enter__()
        wait_for(both_busy, "each replica runs one of two streams")
        for stream in streams:
            stream.__exit__(None, None, None)
    wait_until_idle(app)


def test_a_client_that_goes_away_frees_its_sequence(app, http):
    with http.stream("POST", "/v1/completions", json=body(20_000, stream=True)) as response:
        lines = response.iter_lines()  # kept: httpx closes the stream with its iterator
        next(lines)
        wait_for(lambda: held(app) > 0, "the stream shows as load")
    wait_until_idle(app)


def test_a_client_that_leaves_before_a_whole_reply_frees_it_too(app):
    with httpx.Client(headers=HEADERS, timeout=httpx.Timeout(LIMIT_S, read=0.7)) as http:
        try:
            http.post(f"{app.url}/v1/completions", json=body(20_000))
        except httpx.ReadTimeout:
            pass
        else:
            raise AssertionError("the reply came before the client gave up")
    wait_until_idle(app)


def test_clients_that_go_away_while_queued_leave_nothing_behind(app):
    def every_slot_is_taken() -> bool:
        return all(replica["num_running"] == NUM_SLOTS for replica in app.replicas())

    async def start_and_leave() -> None:
        async with httpx.AsyncClient(
            headers=HEADERS, timeout=LIMIT_S, limits=httpx.Limits(max_connections=100)
        ) as http:
            tasks = [
                asyncio.create_task(http.post(f"{app.url}/v1/completions", json=body(20_000)))
                for _ in range(6 * NUM_SLOTS)
            ]
            await asyncio.to_thread(wait_for, every_slot_is_taken, "every slot is taken and the others wait")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(start_and_leave())
    wait_until_idle(app)


GIVEN_UP_S = 60.0
"""Time after which a process of Ray that has found no exporter has given up: 30 tries, constants of Ray's code."""


def replace_processes(app: Served) -> None:
    """Kill both replicas and the ingress, and wait until Serve has replaced them."""
    before = {replica["replica_id"] for replica in app.replicas()}
    for name in ("Model", "Ingress"):
        for process in app.find_all(f"ray::ServeReplica:headway:{name}"):
            process.kill()

    def are_new() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            replicas = {replica["replica_id"] for replica in app.replicas()}
            return len(replicas) == 2 and not replicas & before
        return False

    wait_for(are_new, "two other replicas are known")


def scraped(app: Served) -> dict[str, list[dict[str, str]]]:
    """Return the labels of each series that Ray's exporters of the cluster show, by name."""
    session = Path(app.places["token_path"]).parent / "ray" / "session_latest"
    [group] = json.loads((session / "prom_metrics_service_discovery.json").read_text())
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for target in group["targets"]:
        page = httpx.get(f"http://{target}/metrics", timeout=LIMIT_S, trust_env=False).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name].append(sample.labels)
    return found


def test_rays_exporter_has_the_engines_metrics_by_deployment_and_replica(app, http):
    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=app.url, headers=HEADERS, timeout=LIMIT_S) as client:
            await asyncio.gather(*(client.post("/v1/completions", json=body(4, user=str(n))) for n in range(16)))

    def of_both() -> dict[str, list[dict[str, str]]] | None:
        try:
            found = scraped(app)
        except httpx.ConnectError:  # Ray lists an exporter before it listens.
            return None
        replicas = {replica["replica_id"] for replica in app.replicas()}
        served = {labels["replica"] for labels in found["ray_vllm_generation_tokens_total"]}
        has_router = any(labels["deployment"] == "Ingress" for labels in found["ray_headway_finished_tokens_total"])
        return found if replicas <= served and has_router else None

    asyncio.run(ask_all())
    try:
        found = wait_for(of_both, "Ray shows both replicas", GIVEN_UP_S, period_s=1.0)
    except TimeoutError:
        replace_processes(app)
        asyncio.run(ask_all())
        found = wait_for(of_both, "Ray shows the processes that began after its exporter", period_s=1.0)
    for name in ("ray_vllm_time_to_first_token_seconds_bucket", "ray_vllm_kv_cache_usage_perc"):
        for labels in found[name]:
            assert labels["deployment"] == "Model" and labels["application"]
            assert labels["model_name"] == MODEL_NAME and labels["WorkerId"]
    # Ray's dashboard of LLMs asks for the replicas' names by their worker.
    workers = {labels["WorkerId"] for labels in found["ray_vllm_kv_cache_usage_perc"]}
    assert workers <= {labels["WorkerId"] for labels in found["ray_serve_deployment_request_counter_total"]}


def test_a_request_has_one_line_on_the_terminal(app, http):
    http.post("/v1/completions", json=body(2), headers={**HEADERS, "x-request-id": "shown-once"}).raise_for_status()

    def lines() -> list[str]:
        return [line for line in (app.home / OUTPUT).read_text().splitlines() if "shown-once" in line]

    [line] = wait_for(lines, "the line is printed")
    assert f" POST /v1/completions 200 model={MODEL_NAME} band=standard tenant={KEY} in=" in line
    assert " out=2 " in line and "queue_s=" in line and "ttft_s=" in line
