"""Configuration: its fields become the parts' settings, or are refused with a message that names both values."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from pydantic import ValidationError

from replicas.engine.config import EngineLimits, KVPressurePolicy
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import StreamOptions
from replicas.protocol import Auto, Band
from replicas.settings import settings_of
from router.scaling.autoscaling import DownscaleDelay
from router.types import LatencyTargets
from serve_app.config import PARTS, HeadwayConfig
from serve_app.config_page import IMPORTANT, page
from serve_app.deployments.autoscaling import with_gpus
from serve_app.settings.replaced import REPLACED

ROOT = Path(__file__).resolve().parents[2]

HOMONYMS = {
    ("Coalescing", "max_stream_chunks_per_s"),  # the setting, decided for the device that was found
    ("EngineConfig", "async_scheduling"),  # the setting, decided for the device that was found
    ("EngineLimits", "max_queued_requests"),  # of the engine's own short queue; the setting is an ingress's
    ("EngineLimits", "max_queued_tokens"),
    ("ReplicaStats", "block_size"),  # a report of the value in use
    ("BandLimits", "max_wait_s"),  # of one band
    ("Headroom", "max_wait_s"),
    ("WorkLimits", "max_wait_s"),  # for a thread
    ("TokenizeBody", "model"),  # of a request
    ("DetokenizeBody", "model"),
    ("UsageListQuery", "model"),
}
"""Fields that share a setting's name, but not its meaning, and have a default."""


def test_strings_of_the_command_line_become_typed_values():
    config = HeadwayConfig.model_validate(
        {
            "num_replicas": "2",
            "kv_cache_bytes": "2GiB",
            "enable_prefix_caching": "false",
            "max_model_len": "none",
            "kv_pressure_policy": "pause_new",
            "num_gpus_per_replica": "0.5",
            "coalesce_interval_s": "0.05",
        }
    )
    options = config.replica_options()
    assert (options.runner.kv_cache_bytes, type(options.runner.kv_cache_bytes)) == (2 * 2**30, int)
    assert (options.limits.enable_prefix_caching, options.model.max_model_len) == (False, None)
    assert options.limits.kv_pressure_policy is KVPressurePolicy.PAUSE_NEW
    numbers = (config.num_replicas, config.num_gpus_per_replica, options.streams.coalesce_interval_s)
    assert numbers == (2, 0.5, 0.05)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_seq": 3}, ["max_num_seq", "not permitted"]),
        ({"allowed_origins": "app.example.com"}, ["allowed_origins has `app.example.com`", "scheme://host"]),
        ({"num_replicas": 0}, ["num_replicas", "greater than or equal to 1"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "Input should be a valid integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "greater than or equal to 1"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "less than or equal to 1"]),
        ({"kv_cache_bytes": "much"}, ["kv_cache_bytes", "byte string"]),
        ({"kv_cache_bytes": 0}, ["kv_cache_bytes", "greater than 0"]),
        ({"batch_drain_s": 1}, ["batch_drain_s (1)", "target_drain_s (2)"]),
        ({"max_num_seqs": 600}, ["max_num_batched_tokens (512)", "max_num_seqs (600)"]),
        ({"device": "cpu", "num_gpus_per_replica": 1}, ["device (cpu)", "num_gpus_per_replica (1)"]),
        (
            {"device": "cuda", "async_scheduling": True, "num_gpus_per_replica": 0},
            ["device (cuda)", "num_gpus_per_replica (0)"],
        ),
        ({"device": "cpu", "compile_layers": True}, ["device (cpu)", "compile_layers (true)"]),
        ({"device": "cpu", "attention_backend": "triton"}, ["device (cpu)", "attention_backend (triton)"]),
        (
            {"batch_invariant": True, "attention_backend": "gather"},
            ["batch_invariant (true)", "attention_backend (gather)"],
        ),
        (
            {"batch_invariant": True, "attention_backend": "gather", "device": "cpu"},
            ["batch_invariant (true)", "attention_backend (gather)"],
        ),
        (
            {"attention_backend": "flash", "kv_cache_dtype": "fp8"},
            ["attention_backend (flash)", "kv_cache_dtype (fp8)"],
        ),
        (
            {"batch_invariant": True, "quantization": "fp8_w8a8"},
            ["batch_invariant (true)", "quantization (fp8_w8a8)"],
        ),
        ({"attention_backend": "fast"}, ["attention_backend", "'auto', 'flash', 'triton' or 'gather'"]),
        ({"dtype": "int8"}, ["dtype", "float32"]),
        ({"tensor_parallel_size": 2, "num_gpus_per_replica": 1}, ["tensor_parallel_size (2)", "(1)"]),
        ({"tensor_parallel_size": 9}, ["tensor_parallel_size", "8"]),
    ],
)
def test_a_mistake_is_refused_in_words(fields, words):
    with pytest.raises(ValidationError) as caught:
        HeadwayConfig.model_validate(fields)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 0.5, "auto"), ("auto", 1, "auto"), ("cuda", 0, "cuda"), ("cpu", 0, "cpu")],
)
def test_the_device_auto_is_a_gpu_only_for_a_replica_that_was_given_one(device, num_gpus, expected):
    options = HeadwayConfig(device=device).replica_options().with_gpus(num_gpus)
    assert (options.model.device, options.runner.num_gpus) == (expected, num_gpus)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, (256, 2048)),
        ({"max_num_seqs": 64}, (64, 2048)),
        ({"max_num_batched_tokens": 128}, (127, 128)),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 32}, (32, 512)),
    ],
)
def test_limits_of_steps_that_are_not_given_depend_on_the_device(fields, limits):
    on_gpu = with_gpus(HeadwayConfig(num_gpus_per_replica=1, max_replicas=1, **fields))
    assert (on_gpu.engine_limits().max_num_seqs, on_gpu.engine_limits().max_num_batched_tokens) == limits
    assert on_gpu.engine_limits().lowered == {"max_num_seqs", "max_num_batched_tokens"} - fields.keys()
    assert with_gpus(on_gpu) == on_gpu and with_gpus(on_gpu).engine_limits() == on_gpu.engine_limits()


def test_without_a_gpu_the_limits_of_steps_are_those_of_a_processor():
    limits = with_gpus(HeadwayConfig(num_gpus_per_replica=0)).engine_limits()
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.lowered) == (32, 512, frozenset())


def test_every_field_says_what_it_does():
    assert [name for name, field in HeadwayConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("model", "served_model_name", "expected"),
    [
        (None, None, "headway-demo"),
        ("headway-demo", None, "headway-demo"),
        ("org/model-7b", None, "org/model-7b"),
        ("org/model-7b", "mine", "mine"),
        (None, "mine", "mine"),
    ],
)
def test_the_name_clients_ask_for(model, served_model_name, expected):
    assert HeadwayConfig(model=model, served_model_name=served_model_name).model_name == expected


def test_a_directory_is_made_absolute_and_gives_its_name(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    config = HeadwayConfig(model="my-model")
    assert config.model_path == str(tmp_path / "my-model")
    assert config.model_name == "my-model"


def declarations() -> dict[str, list[str]]:
    """Return the classes of the product that give a field a default, by the field's name."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in ("serve_app", "router", "replicas"):
        for path in (ROOT / package).rglob("*.py"):
            classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            for declaring, field in ((one.name, field) for one in classes for field in one.body):
                match field:
                    case ast.AnnAssign(target=ast.Name(name), value=ast.expr()) if (declaring, name) not in HOMONYMS:
                        found[name].append(declaring)
    return found


def test_each_setting_is_declared_once():
    declared = declarations()
    classes = {name: declared[name] for name in HeadwayConfig.model_fields}
    assert {name: where for name, where in classes.items() if len(where) != 1} == {}
    assert {where for (where,) in classes.values()} == {"HeadwayConfig"} | {part.__name__ for part in PARTS}


def test_docs_configuration_is_generated_from_the_code():
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == page(), "python -m serve_app.config_page > docs/configuration.md"
    assert len(IMPORTANT) == 10 and IMPORTANT.keys() <= HeadwayConfig.model_fields.keys()


@pytest.mark.parametrize("value", [None, "none", 1024])
@pytest.mark.parametrize("name", REPLACED)
def test_a_former_setting_is_refused_with_what_replaces_it(name: str, value: object):
    with pytest.raises(ValidationError, match=re.escape(f"{name} is no longer a setting. {REPLACED[name]}")):
        HeadwayConfig.model_validate({name: value})


def test_what_replaces_a_former_setting_exists():
    assert not REPLACED.keys() & HeadwayConfig.model_fields.keys()
    named = {word for text in REPLACED.values() for word in re.findall(r"\b(?:[a-z]+_)+[a-z]+\b", text)}
    assert named - HeadwayConfig.model_fields.keys() == {"least_tokens"}


def test_several_former_settings_are_refused_at_once():
    with pytest.raises(ValidationError, match=r"max_choices is no longer .* max_messages is no longer"):
        HeadwayConfig.model_validate({"max_choices": 3, "max_messages": 4})


@pytest.mark.parametrize("part", PARTS)
def test_every_setting_reaches_its_part(part):
    other_than_7 = {
        "kv_pressure_policy": "pause_new", "dtype": "float16", "device": "cuda", "quantization": "int8",
        "attention_backend": "triton", "kv_cache_dtype": "int8", "gpu_memory_utilization": 0.5,
        "kernel_cache_dir": "there",
        "api_key_file": "there",
        "max_num_seqs": 3, "batch_drain_s": 9, "async_scheduling": True, "max_stored_bytes": 2**21,
        "allowed_hosts": "there", "enable_prefix_caching": False, "compile_layers": True, "enforce_eager": True,
        "batch_invariant": True,
        "generation_config": "vllm", "allowed_origins": "null", "chat_template": "default",
        "tool_call_parser": "hermes", "prefix_cache_scope": "shared", "unknown_fields": "refuse",
        "downscale_delay_s": DownscaleDelay(7.0),
        "otlp_traces_endpoint": "http://there", "trace_sampling_ratio": 0.5, "trace_prompts": True,
    }  # fmt: skip
    values = {name: other_than_7.get(name, 7) for name in settings_of(part)}
    config = HeadwayConfig.model_validate(values)
    options = config.replica_options()
    composed = [options.model, options.runner, options.limits, options.streams, config.flow_limits(),
                config.autoscaling_settings(), config.ingress_settings(), config.ingress_settings().limits,
                config.jobs_settings(), config.watch_settings(), config.tracing_settings()]  # fmt: skip
    (made,) = (one for one in composed if type(one) is part)
    expected = {name: getattr(config, name) for name in values}
    assert {name: getattr(made, name) for name in values} == expected
    assert all(expected[name] != entry.default for name, entry in settings_of(part).items())


@pytest.mark.parametrize(
    ("part", "name", "value", "bound"),
    [
        (EngineLimits, "max_num_seqs", 0, "at least 1"),
        (RunnerOptions, "gpu_memory_utilization", 1.5, "at most 1"),
        (StreamOptions, "max_stream_chunks_per_s", 0, "above 0"),
    ],
)
def test_a_part_checks_its_bounds_itself(part, name, value, bound):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value}; it must be {bound}")):
        part(**{name: value})


def test_a_part_does_not_check_a_setting_that_is_none():
    assert ModelOptions("m", max_model_len=None).max_model_len is None


def test_replicas_are_given_what_follows_from_other_settings():
    config = HeadwayConfig.model_validate({"max_num_seqs": 7, "max_starvation_s": 4.0, "cpus_per_replica": 2.0})
    options = config.replica_options()
    assert (options.limits.promote_after_s, options.model.num_threads) == (3.0, 2)
    # Requests wait in the ingress; an engine's queue is as long as late binding needs.
    assert options.limits.max_queued_requests == 7 * (8 + 2) * len(Band)


@pytest.mark.parametrize("num_ingress_replicas", [1, 4])
def test_serve_refuses_later_than_the_engine(num_ingress_replicas):
    config = HeadwayConfig.model_validate(
        {
            "max_num_seqs": 4,
            "max_queue": "interactive=10/4000000",
            "num_replicas": 3,
            "num_ingress_replicas": num_ingress_replicas,
        }
    )
    assert config.max_ongoing_requests_per_replica > 4 + config.engine_limits().max_queued_requests
    may_wait = sum(limits.max_requests for limits in config.flow_limits().bands.values())
    assert config.max_ongoing_requests_per_ingress > 3 * config.max_ongoing_requests_per_replica + may_wait
    in_all_ingresses = config.num_ingress_replicas * config.max_ongoing_requests_per_ingress
    assert config.max_ongoing_requests_for_jobs > in_all_ingresses


@pytest.mark.parametrize("url", [None, "sqlite:////tmp/jobs.sqlite3"])
def test_more_than_one_jobs_worker_needs_postgresql(url: str | None):
    with pytest.raises(ValidationError, match=r"num_jobs_workers \(2\) must be 1 unless database_url is PostgreSQL's"):
        HeadwayConfig.model_validate({"num_jobs_workers": 2, "database_url": url})
    config = HeadwayConfig.model_validate({"num_jobs_workers": 4, "database_url": "postgresql+psycopg://host/jobs"})
    assert config.num_jobs_workers == 4


def test_replicas_have_room_for_the_requests_of_every_jobs_worker():
    fields = {"database_url": "postgresql+psycopg://host/jobs", "num_ingress_replicas": 8}
    limits = [
        HeadwayConfig.model_validate(fields | {"num_jobs_workers": number}).engine_limits().max_queued_requests
        for number in (1, 2)
    ]
    assert limits[0] < limits[1]


@pytest.mark.parametrize(("fields", "share"), [({}, 1.0), ({"api_key_file": "keys.yaml"}, 0.5)])
def test_a_tenants_share_of_a_queue_needs_keys(fields: dict[str, str], share: float):
    bands = HeadwayConfig.model_validate(fields).flow_limits().bands
    assert {limits.max_tenant_share for limits in bands.values()} == {share}


def test_latency_targets_are_per_band_and_may_be_none():
    targets = HeadwayConfig.model_validate({"slo": "interactive=0.5/0.15,standard=5/none"})
    assert targets.routing_settings().targets == {
        Band.INTERACTIVE: LatencyTargets(ttft_s=0.5, tpot_s=0.15),
        Band.STANDARD: LatencyTargets(ttft_s=5.0, tpot_s=None),
        Band.BATCH: LatencyTargets(ttft_s=None, tpot_s=None),
    }
    assert targets.engine_limits().tpot_targets_s == (0.15, None, None)
    assert HeadwayConfig().engine_limits().tpot_targets_s == (Auto.AUTO, 0.25, None)


def test_none_is_no_value_of_a_field_that_needs_one():
    with pytest.raises(ValidationError, match="max_num_seqs"):
        HeadwayConfig.model_validate({"max_num_seqs": "none"})
