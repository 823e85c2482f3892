"""What an operator writes becomes what the parts are told, or is refused with both values named."""

import pytest
from pydantic import ValidationError

from replicas.engine.config import EngineConfig, KVPressurePolicy
from replicas.protocol import Band
from router.latency_targets import LatencyTargets
from serve_app.config import HeadwayConfig


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
    assert config.num_replicas == 2
    assert config.kv_cache_bytes == 2 * 2**30
    assert config.enable_prefix_caching is False
    assert config.max_model_len is None
    assert config.kv_pressure_policy is KVPressurePolicy.PAUSE_NEW
    assert config.num_gpus_per_replica == 0.5
    assert config.coalesce_interval_s == 0.05


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_seq": 3}, ["max_num_seq", "not permitted"]),
        ({"num_replicas": 0}, ["num_replicas", "greater than or equal to 1"]),
        ({"max_num_seqs": 600}, ["max_num_batched_tokens (512)", "max_num_seqs (600)"]),
        ({"device": "cpu", "num_gpus_per_replica": 1}, ["device (cpu)", "num_gpus_per_replica (1)"]),
        ({"device": "cuda", "num_gpus_per_replica": 0}, ["device (cuda)", "num_gpus_per_replica (0)"]),
        ({"device": "cpu", "compile_layers": True}, ["device (cpu)", "compile_layers (true)"]),
        ({"device": "cpu", "attention_backend": "triton"}, ["device (cpu)", "attention_backend (triton)"]),
        ({"attention_backend": "fast"}, ["attention_backend", "'auto', 'flash', 'triton' or 'gather'"]),
        ({"dtype": "int8"}, ["dtype", "float32"]),
    ],
)
def test_a_mistake_is_refused_in_words(fields, words):
    with pytest.raises(ValidationError) as caught:
        HeadwayConfig.model_validate(fields)
    assert all(word in str(caught.value) for word in words)


def test_every_field_says_what_it_does():
    assert [name for name, field in HeadwayConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("model", "served_model_name", "expected"),
    [
        (None, None, "headway-demo"),
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


def test_replicas_are_told_every_engine_limit():
    config = HeadwayConfig(max_num_seqs=7, max_starvation_s=4.0, cpus_per_replica=2.0)
    options = config.replica_options()
    assert (options.max_num_seqs, options.promote_after_s, options.num_threads) == (7, 3.0, 2)
    # Requests wait in the ingress; an engine's queue is as long as late binding needs, which is derived.
    shared = EngineConfig.__dataclass_fields__.keys() & HeadwayConfig.model_fields.keys() - {"max_queued_requests"}
    assert {name: getattr(options, name) for name in shared} == {name: getattr(config, name) for name in shared}


@pytest.mark.parametrize("num_ingress_replicas", [1, 4])
def test_serve_refuses_later_than_we_do(num_ingress_replicas):
    config = HeadwayConfig(
        max_num_seqs=4, max_queued_requests=10, num_replicas=3, num_ingress_replicas=num_ingress_replicas
    )
    assert config.max_ongoing_requests_per_replica > config.max_num_seqs + config.replica_options().max_queued_requests
    may_wait = sum(limits.max_requests for limits in config.flow_limits().bands.values())
    assert config.max_ongoing_requests_per_ingress > 3 * config.max_ongoing_requests_per_replica + may_wait
    in_all_ingresses = config.num_ingress_replicas * config.max_ongoing_requests_per_ingress
    assert config.max_ongoing_requests_for_jobs > in_all_ingresses


def test_latency_targets_are_per_band_and_may_be_none():
    targets = HeadwayConfig.model_validate({"interactive_ttft_target_s": "0.5", "standard_tpot_target_s": "none"})
    by_band = targets.latency_targets()
    assert by_band[Band.INTERACTIVE] == LatencyTargets(ttft_s=0.5, tpot_s=0.15)
    assert by_band[Band.STANDARD] == LatencyTargets(ttft_s=5.0, tpot_s=None)
    assert by_band[Band.BATCH] == LatencyTargets(ttft_s=None, tpot_s=None)


def test_none_is_no_value_of_a_field_that_needs_one():
    with pytest.raises(ValidationError, match="max_num_seqs"):
        HeadwayConfig.model_validate({"max_num_seqs": "none"})
