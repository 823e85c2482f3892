"""What an operator writes becomes what the parts are told, or is refused with both values named."""

import pytest
from pydantic import ValidationError

from replicas.engine.config import EngineConfig, KVPressurePolicy
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
    config = HeadwayConfig(max_num_seqs=7, max_queued_requests=9, max_starvation_s=3.0, cpus_per_replica=2.0)
    options = config.replica_options()
    assert (options.max_num_seqs, options.max_queued_requests, options.max_starvation_s) == (7, 9, 3.0)
    assert options.num_threads == 2
    shared = EngineConfig.__dataclass_fields__.keys() & HeadwayConfig.model_fields.keys()
    assert {name: getattr(options, name) for name in shared} == {name: getattr(config, name) for name in shared}


def test_serve_refuses_later_than_the_engine_does():
    config = HeadwayConfig(max_num_seqs=4, max_queued_requests=10, num_replicas=3)
    # Running, preempted by each of the two more urgent bands, and queued.
    assert config.max_ongoing_requests_per_replica > 4 + 2 * 4 + 10
    assert config.max_ongoing_requests_per_ingress > 3 * config.max_ongoing_requests_per_replica
