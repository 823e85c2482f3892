"""Health, metrics, load, models and the tokenizer's endpoints."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.errors import NoReplicaAvailable
from replicas.protocol import EngineMetrics, HistogramMetric, Metric, MetricKind
from router.types import ReplicaView
from serve_app.jobs.api.records import JobsCounts
from testkit.http.api import MODEL, REPLY, Api, MakeApi, card_of, refusal


def view(api: Api, age_s: float = 0.1, num_running: int = 0, **stats: Any) -> ReplicaView:
    stats = {"num_running_by_band": (0, num_running, 0), **stats}
    return ReplicaView(replace(api.replica.stats(), **stats), age_s, own_by_band=(0, num_running, 0))


async def test_ready_when_a_replica_says_what_it_serves(api: Api) -> None:
    for path in ("/health/live", "/health/ready", "/health"):
        assert (await api.http.get(path)).status_code == 200


@pytest.mark.parametrize(("fault", "shown"), [(None, "ok"), ("storage_full", "storage_full")])
async def test_storage_of_jobs_is_in_health_and_not_in_readiness(api: Api, fault: str | None, shown: str) -> None:
    api.jobs.fault = fault
    assert (await api.http.get("/health")).json() == {"status": "ready", "jobs": shown}
    assert (await api.http.get("/health/ready")).json() == {"status": "ready"}
    api.jobs.error = NoReplicaAvailable("the jobs process does not answer")
    assert (await api.http.get("/health")).json()["jobs"] == "unavailable"


async def test_health_without_jobs_names_none(make_api: MakeApi) -> None:
    assert (await make_api(has_jobs=False).http.get("/health")).json() == {"status": "ready", "jobs": None}


async def test_not_ready_while_loading_but_live(make_api: MakeApi) -> None:
    api = make_api(dispatcher={"error": NoReplicaAvailable("loading", code="model_loading")})
    for path in ("/health/ready", "/health", "/v1/models"):
        response = await api.http.get(path)
        assert refusal(response) == (503, "model_loading", None)
        assert response.headers["retry-after"] == "5"
    assert (await api.http.get("/health/live")).status_code == 200


async def test_not_ready_when_all_replicas_drain(api: Api) -> None:
    api.dispatcher.views = [view(api, is_draining=True), view(api)]
    assert (await api.http.get("/health/ready")).status_code == 200
    api.dispatcher.views = [view(api, is_draining=True)]
    assert refusal(await api.http.get("/health/ready")) == (503, "draining", None)
    assert (await api.http.get("/health/live")).status_code == 200


async def test_readiness_is_asked_anew_every_time(api: Api) -> None:
    assert (await api.http.get("/health/ready")).status_code == 200
    api.dispatcher.error = NoReplicaAvailable("gone")
    assert (await api.http.get("/health/ready")).status_code == 503
    # What is known of the model stays in use: the request itself finds out, or waits.
    assert (await api.complete()).status_code == 200


STALLED = (503, "engine_stalled", None)


async def test_silent_replica_with_work_is_not_live(make_api: MakeApi) -> None:
    api = make_api(settings={"stall_timeout_s": 30})
    api.dispatcher.views = api.dispatcher.views_after_refresh = [view(api, age_s=31, num_running=1)]
    response = await api.http.get("/health/live")
    assert refusal(response) == STALLED
    assert "replica-a" in response.json()["error"]["message"]
    api.dispatcher.error = NoReplicaAvailable("no answer")
    assert refusal(await api.http.get("/health/live")) == STALLED


@pytest.mark.parametrize(
    ("fields", "is_live"),
    [
        ({"age_s": 29, "num_running": 1}, True),
        ({"age_s": 1000, "num_waiting_by_band": (0, 0, 0)}, True),
        ({"age_s": 31, "num_waiting_by_band": (0, 1, 0)}, False),
        ({"age_s": 0, "num_running": 1, "stalled_s": 31}, False),
    ],
    ids=["fresh", "idle", "all wait", "answers while its engine hangs"],
)
async def test_replica_is_live_unless_its_work_stalls(make_api: MakeApi, fields: dict[str, Any], is_live: bool) -> None:
    api = make_api(settings={"stall_timeout_s": 30})
    api.dispatcher.views = api.dispatcher.views_after_refresh = [view(api, **fields)]
    response = await api.http.get("/health/live")
    assert response.is_success is is_live
    assert is_live or refusal(response) == STALLED


async def test_silent_replica_is_asked_before_it_counts_as_stalled(make_api: MakeApi) -> None:
    api = make_api(settings={"stall_timeout_s": 30})
    api.dispatcher.views = [view(api, age_s=31, num_running=1)]
    api.dispatcher.views_after_refresh = [view(api, age_s=0, num_running=1)]
    assert (await api.http.get("/health/live")).status_code == 200


async def test_load_shows_every_replica_and_the_age_of_what_is_known(api: Api) -> None:
    api.dispatcher.views = [view(api, age_s=1.25, num_running=2), view(api, replica_id="replica-b")]
    first, second = (await api.http.get("/load")).json()["replicas"]
    assert second["replica_id"] == "replica-b"
    assert first == {
        "replica_id": "replica-a",
        "node_id": "node-1",
        "pid": 4242,
        "age_s": 1.25,
        "num_in_flight": 2,
        "num_slots": 8,
        "num_running": 2,
        "num_running_by_band": {"interactive": 0, "standard": 2, "batch": 0},
        "num_waiting": 3,
        "num_waiting_by_band": {"interactive": 0, "standard": 0, "batch": 3},
        "waiting_tokens": 30,
        "outstanding_tokens": 0,
        "num_blocks": 100,
        "num_free_blocks": 75,
        "kv_usage": 0.25,
        "generated_tokens_per_s": 12.5,
        "is_draining": False,
    }


def engine(replica_id: str, num_preemptions: float) -> EngineMetrics:
    return EngineMetrics(
        replica_id,
        (
            Metric("vllm:num_requests_running", "Running.", MetricKind.GAUGE, 3),
            Metric("vllm:num_preemptions", "Preempted.", MetricKind.COUNTER, num_preemptions),
            Metric("vllm:request_success", "Done.", MetricKind.COUNTER, 5, (("finished_reason", "stop"),)),
            Metric("vllm:request_success", "Done.", MetricKind.COUNTER, 6, (("finished_reason", "length"),)),
        ),
        (HistogramMetric("vllm:iteration_tokens_total", "Tokens of a step.", (1.0, 8.0), (2, 3, 4), 70.5),),
    )


async def samples_of(api: Api) -> Callable[..., float]:
    """Read the page of metrics; return a function that gives the value of a sample by name and labels."""
    response = await api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    return value


async def test_metrics_show_every_engine_under_its_index(api: Api) -> None:
    api.dispatcher.engine_metrics = [engine("r-b", 2), engine("r-a", 1)]
    value = partial(await samples_of(api), model_name=MODEL)
    assert value("vllm:num_requests_running", engine="0") == 3
    assert [value("vllm:num_preemptions_total", engine=index) for index in "01"] == [1, 2]
    assert value("vllm:request_success_total", engine="1", finished_reason="length") == 6
    histogram = partial(value, engine="0")
    buckets = [histogram("vllm:iteration_tokens_total_bucket", le=le) for le in ("1.0", "8.0", "+Inf")]
    totals = [histogram(f"vllm:iteration_tokens_total_{name}") for name in ("count", "sum")]
    assert (buckets, totals) == ([2, 5, 9], [9, 70.5])


async def test_counters_and_histograms_show_their_start(api: Api) -> None:
    start = Metric("headway:engine_start_time_seconds", "Start.", MetricKind.GAUGE, 1234.5, is_mean=True)
    api.dispatcher.engine_metrics = [
        replace(each, metrics=(*each.metrics, start)) for each in (engine("r-a", 1), engine("r-b", 2))
    ]
    value = partial(await samples_of(api), model_name=MODEL)
    for index in "01":
        assert value("vllm:num_preemptions_created", engine=index) == 1234.5
        assert value("vllm:request_success_created", engine=index, finished_reason="stop") == 1234.5
        assert value("vllm:iteration_tokens_total_created", engine=index) == 1234.5
    page = (await api.http.get("/metrics")).text
    assert "vllm:num_requests_running_created" not in page
    assert "# TYPE vllm:num_preemptions_created gauge" in page


async def test_choices_are_counted_for_each_prompt(api: Api) -> None:
    await api.complete(n=2, max_tokens=3, prompt=["a", "b"])
    await api.complete(max_tokens=5)
    await api.complete(n=500)
    value = partial(await samples_of(api), model_name=MODEL)
    assert [value(f"vllm:request_params_n_{name}") for name in ("count", "sum")] == [3, 2 + 2 + 1]
    assert [value("vllm:request_params_n_bucket", le=le) for le in ("1.0", "2.0")] == [1, 3]
    assert [value(f"vllm:request_max_num_generation_tokens_{name}") for name in ("count", "sum")] == [3, 3 + 3 + 5]


async def test_choices_that_did_not_end_are_not_counted(make_api: MakeApi) -> None:
    api = make_api(fail_at=2)
    await api.complete(n=2, max_tokens=5)
    assert (await samples_of(api))("vllm:request_params_n_count", model_name=MODEL) == 0


async def test_metrics_of_many_engines_are_summed(api: Api) -> None:
    api.dispatcher.engine_metrics = [engine(f"r-{number:02}", number) for number in range(33)]
    value = partial(await samples_of(api), model_name=MODEL, engine="all")
    assert value("vllm:num_requests_running") == 33 * 3
    assert value("vllm:num_preemptions_total") == sum(range(33))
    assert value("vllm:request_success_total", finished_reason="length") == 33 * 6
    buckets = [value("vllm:iteration_tokens_total_bucket", le=le) for le in ("1.0", "8.0", "+Inf")]
    totals = [value(f"vllm:iteration_tokens_total_{name}") for name in ("count", "sum")]
    assert (buckets, totals) == ([33 * 2, 33 * 5, 33 * 9], [33 * 9, 33 * 70.5])
    assert (await samples_of(api))("headway:engines") == 33


async def test_one_of_many_engines_is_shown_alone(api: Api) -> None:
    api.dispatcher.engine_metrics = [engine(f"r-{number:02}", number) for number in range(40)]
    page = (await api.http.get("/metrics?engine=7")).text
    assert f'vllm:num_preemptions_total{{engine="7",model_name="{MODEL}"}} 7.0' in page
    assert "http_requests" not in page and 'engine="8"' not in page


@pytest.mark.parametrize(
    ("num_engines", "engine_index", "message"),
    [
        (3, "3", "engine is 3; the engines are 0 to 2"),
        (0, "0", "engine is 0; no engine has answered"),
        (3, "x", "engine"),
    ],
)
async def test_an_engine_that_is_not_there_is_refused(
    api: Api, num_engines: int, engine_index: str, message: str
) -> None:
    api.dispatcher.engine_metrics = [engine(f"r-{number}", number) for number in range(num_engines)]
    response = await api.http.get(f"/metrics?engine={engine_index}")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "engine") and message in error["message"]


async def test_streams_go_on_while_the_metrics_are_made(api: Api) -> None:
    api.dispatcher.engine_metrics = [engine(f"r-{number}", number) for number in range(500)]
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await api.http.get("/metrics")
    counting.cancel()
    assert num_turns > 500 / 16, "others run at least after each 16 engines"


async def test_metrics_have_each_family_once(api: Api) -> None:
    api.dispatcher.engine_metrics = [engine("r-b", 2), engine("r-a", 1)]
    types = [line for line in (await api.http.get("/metrics")).text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert "# TYPE vllm:num_preemptions_total counter" in types


async def test_metrics_show_what_the_jobs_deployment_counts(api: Api) -> None:
    counts = (
        Metric("headway:jobs", "Jobs.", MetricKind.GAUGE, 3, (("state", "in_progress"),)),
        Metric("headway:jobs", "Jobs.", MetricKind.GAUGE, 4, (("state", "completed"),)),
        Metric("headway:batch_requests", "Lines.", MetricKind.COUNTER, 7, (("status", "failed"),)),
        Metric("headway:batch_eta_seconds", "Time.", MetricKind.GAUGE, float("inf")),
    )
    api.jobs.counted = JobsCounts(own=counts)
    value = await samples_of(api)
    assert [value("headway:jobs", state=state) for state in ("in_progress", "completed")] == [3, 4]
    assert value("headway:batch_requests_total", status="failed") == 7
    assert value("headway:batch_eta_seconds") == float("inf")


@pytest.mark.parametrize("missing", ["jobs", "dispatcher"])
async def test_metrics_of_this_ingress_survive_without_other_processes(api: Api, missing: str) -> None:
    getattr(api, missing).error = NoReplicaAvailable("it starts again")
    await api.http.get("/health")
    assert "http_requests_total" in (await api.http.get("/metrics")).text


async def test_metrics_count_http_by_route(api: Api) -> None:
    for fields in ({}, {"stream": True}, {"temperature": 9}):
        await api.complete(**fields)
    for path in ("/v1/models/other", "/nowhere"):
        await api.http.get(path)
    value, completions = await samples_of(api), {"handler": "/v1/completions"}
    for handler, method, status, count in (
        ("/v1/completions", "POST", "2xx", 2),
        ("/v1/completions", "POST", "4xx", 1),
        ("/v1/models/{model_id:path}", "GET", "4xx", 1),
        ("none", "GET", "4xx", 1),
    ):
        assert value("http_requests_total", handler=handler, method=method, status=status) == count
    assert value("http_request_duration_seconds_count", method="POST", **completions) == 3
    assert value("http_request_size_bytes_sum", **completions) > 0
    assert value("http_response_size_bytes_sum", **completions) > 1000


async def test_made_up_methods_are_one_series(api: Api) -> None:
    for number in range(5):
        await api.http.request(f"METHOD{number}", "/v1/models")
        await api.http.request(f"METHOD{number}", "/nowhere")
    assert set(re.findall('method="(.*?)"', (await api.http.get("/metrics")).text)) == {"other"}
    assert (await samples_of(api))("http_requests_total", handler="none", method="other", status="4xx") == 5


async def test_two_applications_in_one_process_count_apart(make_api: MakeApi) -> None:
    one, other = make_api(), make_api()
    await one.http.get("/v1/models")
    assert 'handler="/v1/models"' in (await one.http.get("/metrics")).text
    assert 'handler="/v1/models"' not in (await other.http.get("/metrics")).text


async def test_probes_of_a_loading_model_are_no_failed_requests(make_api: MakeApi) -> None:
    api = make_api(dispatcher={"error": NoReplicaAvailable("loading", code="model_loading")})
    for path in ("/health", "/health/live", "/health/ready", "/health/ready/", "/load", "/metrics", "/v1/models"):
        await api.http.get(path)
    page = (await api.http.get("/metrics")).text
    assert set(re.findall('handler="(.*?)"', page)) == {"/v1/models"}
    assert 'http_requests_total{handler="/v1/models",method="GET",status="5xx"} 1.0' in page


async def test_stock_client_lists_the_model(api: Api, tokenizer: Any) -> None:
    models = await api.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    model = await api.openai.models.retrieve(MODEL)
    assert model.model_extra["max_model_len"] == card_of(tokenizer).max_model_len
    assert model.owned_by == "headway"


async def test_served_name_may_have_slashes(make_api: MakeApi) -> None:
    api = make_api(settings={"served_model_name": "org/tiny"})
    assert (await api.http.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"


async def test_tokenize_and_back(api: Api) -> None:
    answer = (await api.post("/tokenize", {"model": MODEL, "prompt": REPLY})).json()
    assert answer == {
        "count": len(answer["tokens"]), "max_model_len": 256, "tokens": answer["tokens"], "token_strs": None
    }  # fmt: skip
    assert (await api.post("/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": REPLY}


async def test_tokenize_spells_tokens_as_the_vocabulary_does(api: Api) -> None:
    answer = (await api.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})).json()
    assert answer["token_strs"] == ["hello", "Ġworld"]


async def test_tokenize_of_messages_is_what_chat_sends(api: Api) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = (await api.post("/tokenize", {"messages": messages})).json()
    await api.chat(messages=messages, max_tokens=1)
    assert answer["tokens"] == list(api.replica.started[0].prompt_token_ids)
    shorter = (await api.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json()
    assert shorter["count"] < answer["count"]


async def test_tokenize_counts_more_than_the_context_takes(api: Api) -> None:
    assert (await api.post("/tokenize", {"prompt": "z" * 1000})).json()["count"] == 1000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "z" * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "z" * 100_000}]}, "messages"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
    ],
)
async def test_tokenizer_endpoints_refuse_what_no_prompt_can_be(
    api: Api, path: str, body: dict[str, Any], param: str
) -> None:
    response = await api.post(path, body)
    assert refusal(response) == (400, "context_length_exceeded", param)
    assert "256" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, 400, "max_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
async def test_tokenizer_endpoints_name_what_they_refuse(
    api: Api, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await api.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_empty_text_has_no_tokens(api: Api) -> None:
    assert (await api.post("/tokenize", {"prompt": ""})).json()["count"] == 0
    assert (await api.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_every_name_of_the_model_is_listed_and_served(make_api: MakeApi) -> None:
    api = make_api(settings={"aliases": ("other",)})
    listed = (await api.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "other"]
    assert (await api.http.get("/v1/models/other")).json()["id"] == "other"
    reply = await api.chat(model="other")
    assert (reply.status_code, reply.json()["model"]) == (200, MODEL)
    assert refusal(await api.chat(model="third"))[0] == 404
